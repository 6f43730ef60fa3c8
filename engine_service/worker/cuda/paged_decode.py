"""A kernel of two parts: decodes read pages, chunks of several tokens have their keys gathered.

Must not know: what the parts are made of.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

import torch

from engine_service.worker.attention import LayerShape
from engine_service.worker.cuda.kernel import Attend, AttentionKernel, KernelStep
from engine_service.worker.cuda.pages import PageRule

DecodeAttention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, KernelStep, LayerShape, int], torch.Tensor]
"""query [N, heads, d], keys, values, step, shape, number of runs that the keys of a request are split in."""

_MOST_SPLITS = 32
_PROGRAMS_PER_PROCESSOR = 2


@dataclass(frozen=True, slots=True)
class PagedDecodeKernel:
    """`decodes` for the requests with one token, which come first in a step; `chunks`, which is asked about the layers
    too, for the others. `processors` of the device share the work. `splits`: None, or a fixed number of runs."""

    decodes: DecodeAttention
    chunks: AttentionKernel
    processors: int
    splits: int | None = None
    pages = PageRule()
    default_block_size = 16
    is_static = True

    @property
    def name(self) -> str:
        return f"triton decode, {self.chunks.name}"

    def refusal(self, layers: Sequence[LayerShape], dtype: torch.dtype) -> str | None:
        return self.chunks.refusal(layers, dtype)

    def start(self, step: KernelStep) -> Attend:
        count = leading_decodes(step)
        rest = None if count == len(step.seq_lens) else self.chunks.start(_after(step, count))

        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: LayerShape) -> torch.Tensor:
            parts = []
            if count:
                splits = self.splits or num_splits(count * shape.num_kv_heads, self.processors)
                parts.append(self.decodes(query[:count], keys, values, step, shape, splits))
            if rest is not None:
                parts.append(rest(query[count:], keys, values, shape))
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return attend


def has_triton() -> bool:
    return find_spec("triton") is not None


def leading_decodes(step: KernelStep) -> int:
    """How many requests from the first on have one token; a static step has no others."""
    if step.query_lens is None:
        return len(step.seq_lens)
    lens = step.query_lens
    return next((place for place, length in enumerate(lens) if length != 1), len(lens))


def num_splits(programs: int, processors: int) -> int:
    """Runs for each request, so that the device has enough to do: a power of two, as few sizes are compiled."""
    wanted = _PROGRAMS_PER_PROCESSOR * processors / programs
    splits = 1
    while splits * 2 <= min(wanted, _MOST_SPLITS):
        splits *= 2
    return splits


def _after(step: KernelStep, count: int) -> KernelStep:
    """The step without its first `count` requests, which have one token each."""
    assert step.query_lens is not None
    assert step.key_lens is not None
    return replace(
        step,
        slot_mapping=step.slot_mapping[count:],
        query_start=step.query_start[count:] - count,
        key_start=step.key_start[count:] - step.key_start[count],
        seq_lens=step.seq_lens[count:],
        tables=step.tables[count:],
        query_lens=step.query_lens[count:],
        key_lens=step.key_lens[count:],
    )
