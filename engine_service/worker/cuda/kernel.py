"""What the CUDA backend needs of an attention kernel, and what a step gives it.

Must not know: any kernel, graphs, requests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine_service.worker.attention import LayerShape
from engine_service.worker.cuda.pages import PageRule

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, LayerShape], torch.Tensor]
"""Attention of one layer in a step: query [T, query heads, d], keys and values [pages, page size, KV heads, d]
-> [T, query heads, d]."""


@dataclass(frozen=True, slots=True)
class KernelStep:
    """The N chunks of a step of T tokens, as a kernel reads them.

    On the device: `slot_mapping` int64 [T]; `query_start` and `key_start` int32 [N + 1], sums of the lengths of chunks
    and of requests; `seq_lens` int32 [N]; `tables` int32 [N, P], page numbers. For the host: the size of a page, bounds
    of a chunk's and of a request's length, and, unless the step is static (a graph's), the lengths themselves.
    """

    slot_mapping: torch.Tensor
    query_start: torch.Tensor
    key_start: torch.Tensor
    seq_lens: torch.Tensor
    tables: torch.Tensor
    page_size: int
    max_query: int
    max_keys: int
    query_lens: Sequence[int] | None
    key_lens: Sequence[int] | None


class AttentionKernel(Protocol):
    """Causal attention over paged KV, aligned at the end: a chunk's last token sees all of its request."""

    @property
    def name(self) -> str: ...

    @property
    def pages(self) -> PageRule: ...

    @property
    def default_block_size(self) -> int: ...

    @property
    def is_static(self) -> bool:
        """Whether it reads only what is on the device, so that a graph may hold it."""
        ...

    def refusal(self, layers: Sequence[LayerShape], dtype: torch.dtype) -> str | None:
        """Why it cannot attend in these layers, or None. What it does not know of itself, the self test finds."""
        ...

    def start(self, step: KernelStep) -> Attend:
        """Prepare what all layers of the step share; once per step."""
        ...
