"""How much memory steps need beside weights and KV pool: one largest step is run, and its peak is measured.

Must not know: the pool, kernels, requests.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from engine_service.worker.paged_model import AttentionCall, StepModel

# Estimates, beside what is measured: the nodes of a graph; the sampler's workspaces for 32 rows, about so many floats
# for each token of the vocabulary; what libraries take for themselves when a kernel is first used.
_GRAPH_BYTES = 4 * 1024**2
_SAMPLER_ROWS = 32
_SAMPLER_FLOATS = 8
_LIBRARY_BYTES = 256 * 1024**2


class MemoryMeter(Protocol):
    """Measures a device's memory."""

    def begin(self) -> None:
        """From now on."""
        ...

    def peak(self) -> int:
        """The most bytes that were taken at once since `begin`, beyond those taken then."""
        ...


class CudaMeter:
    """Of this process, by torch's allocator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._before = 0

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)

    def peak(self) -> int:
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_allocated(self._device) - self._before
        torch.cuda.empty_cache()  # so that it counts as free when the pool is sized
        return peak


@dataclass(frozen=True, slots=True)
class LargestStep:
    """A step as large as the scheduler may make it: `tokens`, of which `rows` sample."""

    tokens: int
    rows: int


class _NoAttention:
    """A context in which every layer gets zeros."""

    def attention(self, call: AttentionCall) -> torch.Tensor:
        _, heads, tokens, _ = call.query.shape
        return call.query.new_zeros(1, tokens, heads, call.value.shape[-1])


def measure_peak(model: StepModel, device: torch.device, step: LargestStep, meter: MemoryMeter) -> int:
    """Bytes that the largest step takes for what it computes on the way, logits included."""
    tokens = torch.arange(step.tokens, device=device)
    ids, rows = torch.zeros_like(tokens), tokens[: step.rows].clone()
    with torch.inference_mode():
        meter.begin()
        logits = model.forward(ids, torch.zeros_like(tokens), rows, _NoAttention())
        logits.float().max(dim=-1)
        del logits
        return meter.peak()


def bytes_beside_pool(peak: int, vocab_size: int, num_graphs: int, spare_block: int, gathered: int) -> int:
    """All in bytes. `spare_block`: what padding uses. `gathered`: keys and values that are copied to be read."""
    sampler = _SAMPLER_ROWS * _SAMPLER_FLOATS * vocab_size * torch.float32.itemsize
    return peak + sampler + num_graphs * _GRAPH_BYTES + spare_block + gathered + _LIBRARY_BYTES
