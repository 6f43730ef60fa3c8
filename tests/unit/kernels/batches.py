"""Flattened batches for the kernels, made by hand: each request has its own scattered blocks.

Must not know: the worker, the scheduler.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from engine_service.worker.kernels.step_batch import StepBatch


@dataclass(slots=True)
class Request:
    """Tokens so far, how many of them are computed, and the blocks that hold them."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0


@dataclass(slots=True)
class Requests:
    """Hands out blocks in an order that is neither ascending nor contiguous."""

    num_blocks: int
    block_size: int = 16
    free: list[int] = field(init=False)

    def __post_init__(self) -> None:
        order = torch.randperm(self.num_blocks, generator=torch.Generator().manual_seed(3))
        self.free = order.tolist()

    def add(self, tokens: Sequence[int], room: int = 64) -> Request:
        """A request with blocks for its tokens and `room` more."""
        count = -(-(len(tokens) + room) // self.block_size)
        return Request(list(tokens), [self.free.pop() for _ in range(count)])

    def batch(self, chunks: Sequence[tuple[Request, int]], *, sample_all: bool = False) -> StepBatch:
        """The next `n` tokens of each request; samples where a chunk reaches the last token, or everywhere."""
        spans = [(request, request.computed, request.computed + count) for request, count in chunks]
        ids = [token for request, start, end in spans for token in request.tokens[start:end]]
        positions = [position for _, start, end in spans for position in range(start, end)]
        slots = [self._slot(request, p) for request, start, end in spans for p in range(start, end)]
        starts = [0]
        for _, start, end in spans:
            starts.append(starts[-1] + end - start)
        ends = [starts[i + 1] - 1 for i, (r, _, end) in enumerate(spans) if end == len(r.tokens)]
        rows = list(range(len(ids))) if sample_all else ends
        width = max(len(request.blocks) for request, _, _ in spans)
        tables = [request.blocks + [0] * (width - len(request.blocks)) for request, _, _ in spans]
        for request, _, end in spans:
            request.computed = end
        return StepBatch(
            input_ids=torch.tensor(ids, dtype=torch.int64),
            positions=torch.tensor(positions, dtype=torch.int64),
            slot_mapping=torch.tensor(slots, dtype=torch.int64),
            block_tables=torch.tensor(tables, dtype=torch.int32),
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor([end for _, _, end in spans], dtype=torch.int32),
            sample_rows=torch.tensor(rows, dtype=torch.int64),
        )

    def _slot(self, request: Request, position: int) -> int:
        return request.blocks[position // self.block_size] * self.block_size + position % self.block_size
