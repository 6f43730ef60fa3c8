"""Transfers that a device makes while the host goes on: arrays through pinned memory, tokens in one copy a step.

On a CPU the same code runs with ordinary memory. Must not know: the model, kernels, requests.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from engine_service.worker.cuda.staging import Fence, StagingRing
from engine_service.worker.sampled import Sampled
from engine_service.worker.transfer import Fetched, SampledLists

_STEPS_IN_FLIGHT = 2
_REGION_BYTES = 4 * 1024 * 1024


class NoFence:
    """Of a device that has done everything when a call returns."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def fence_for(device: torch.device) -> Fence:
    return torch.cuda.Event() if device.type == "cuda" else NoFence()


class PinnedTransfer:
    """`max_rows`: as many tokens as one step samples at most."""

    runs_ahead = True

    def __init__(self, device: torch.device, max_rows: int) -> None:
        self._device = device
        self._is_pinned = device.type == "cuda"
        count = _STEPS_IN_FLIGHT + 1
        self._ring = StagingRing(
            [self._host_memory(_REGION_BYTES, torch.uint8) for _ in range(count)],
            [fence_for(device) for _ in range(count)],
            self._copy,
        )
        self._results = [self._host_memory(3 * max_rows, torch.int64) for _ in range(count)]
        self._result_fences = [fence_for(device) for _ in range(count)]
        self._step = 0

    def begin_step(self) -> None:
        self._step = (self._step + 1) % len(self._results)
        self._ring.next_region()

    def upload(self, array: npt.NDArray) -> torch.Tensor:
        contiguous = np.ascontiguousarray(array)
        uploaded = self._ring.put(contiguous)
        # Rare (a very long prompt): memory of its own, which torch keeps until the device has read it.
        return self._copy(self._pinned(torch.from_numpy(contiguous))) if uploaded is None else uploaded

    def fetch(self, sampled: Sampled) -> Fetched:
        columns = pack(sampled)
        place = self._results[self._step][: columns.numel()].view(columns.shape)
        place.copy_(columns, non_blocking=True)
        fence = self._result_fences[self._step]
        fence.record()
        return _waiting(fence, place, has_choice=sampled.has_choice is not None)

    def _copy(self, staged: torch.Tensor) -> torch.Tensor:
        # On a CPU `to` would give the staged memory itself, which the next step but one overwrites.
        return staged.to(self._device, non_blocking=True, copy=True)

    def _host_memory(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, pin_memory=self._is_pinned)

    def _pinned(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self._is_pinned else tensor


def pack(sampled: Sampled) -> torch.Tensor:
    """int64 [2 or 3, R]: ids, soundness and, if it is known, whether there was a choice."""
    columns = [sampled.token_ids, sampled.sound.long()]
    if sampled.has_choice is not None:
        columns.append(sampled.has_choice.long())
    return torch.stack(columns)


def _waiting(fence: Fence, place: torch.Tensor, *, has_choice: bool) -> Callable[[], SampledLists]:
    def read() -> SampledLists:
        fence.synchronize()
        rows = place.tolist()
        return SampledLists(rows[0], [bool(sound) for sound in rows[1]], _bools(rows[2]) if has_choice else None)

    return read


def _bools(numbers: list[int]) -> list[bool]:
    return [bool(number) for number in numbers]
