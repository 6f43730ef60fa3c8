"""The scheduler's KV blocks as the pages of an attention kernel: the one place that knows both sizes.

A block is a run of neighbouring slots, so a pool of blocks is also a pool of smaller pages, seen through another
view: nothing is copied. Must not know: kernels, requests, which block is free.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PageRule:
    """What a kernel asks of its pages: a multiple of `multiple` tokens, `largest` tokens at most (None: any)."""

    multiple: int = 1
    largest: int | None = None

    def page_size(self, block_size: int) -> int | None:
        """The largest page that blocks of this size are made of; None if there is none."""
        most = block_size if self.largest is None else min(block_size, self.largest)
        sizes = range(most - most % self.multiple, 0, -self.multiple)
        return next((size for size in sizes if block_size % size == 0), None)


@dataclass(frozen=True, slots=True)
class Pages:
    """Blocks of `block_size` tokens, each of which is a run of pages of `page_size`, which divides it."""

    block_size: int
    page_size: int

    @property
    def per_block(self) -> int:
        return self.block_size // self.page_size

    def of_pool(self, pool: torch.Tensor) -> torch.Tensor:
        """[blocks, block size, ...] -> [pages, page size, ...], the same memory."""
        return pool.view(-1, self.page_size, *pool.shape[2:])

    def tables(self, block_tables: torch.Tensor) -> torch.Tensor:
        """int32 [N, W] block numbers -> int32 [N, W * per block] page numbers, contiguous."""
        if self.per_block == 1:
            return block_tables.contiguous()
        within = torch.arange(self.per_block, dtype=torch.int32, device=block_tables.device)
        return (block_tables.unsqueeze(2) * self.per_block + within).flatten(1)
