"""The tensors that the decode graphs read: filled with each step's rows, padded with rows that harm nobody.

A padding row is a request of one token whose KV lies in a block that the scheduler does not have.
Must not know: the model, kernels, how a graph is captured.
"""

from collections.abc import Sequence

import torch

from engine_service.worker.attention import BatchLayout
from engine_service.worker.input_batch import StepInput


class StaticStep:
    """For `rows` decodes at most, of requests of `max_blocks` blocks at most; all graphs share its memory."""

    def __init__(self, rows: int, max_blocks: int, block_size: int, spare_block: int, device: torch.device) -> None:
        """`spare_block`: the block that padding rows write to and read from."""
        self._device = device
        self._spare_block = spare_block
        self._spare_slot = spare_block * block_size
        self._ids = torch.zeros(rows, dtype=torch.int64, device=device)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self._slots = torch.full((rows,), self._spare_slot, dtype=torch.int64, device=device)
        self._seq_lens = torch.ones(rows, dtype=torch.int32, device=device)
        self._tables = torch.full((rows, max_blocks), spare_block, dtype=torch.int32, device=device)
        self._query_start = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(rows, dtype=torch.int64, device=device)

    def fill(self, step: StepInput, size: int) -> None:
        """The step's N decodes, and padding up to `size` rows."""
        layout, count = step.layout, len(step.input_ids)
        self._ids[:count] = step.input_ids
        self._positions[:count] = step.positions
        self._slots[:count] = layout.slot_mapping
        self._seq_lens[:count] = layout.seq_lens
        self._tables[:count, : layout.block_tables.shape[1]] = layout.block_tables
        if count < size:
            self._ids[count:size] = 0
            self._positions[count:size] = 0
            self._slots[count:size] = self._spare_slot
            self._seq_lens[count:size] = 1
            self._tables[count:size, 0] = self._spare_block

    def inputs(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and sampling rows of the first `size` rows, each int64 [size]."""
        return self._ids[:size], self._positions[:size], self._rows[:size]

    def layout(self, size: int) -> BatchLayout:
        """Of the first `size` rows. The host does not know what the tensors will hold: its lists are empty."""
        nothing: Sequence[int] = ()
        return BatchLayout(
            slot_mapping=self._slots[:size],
            query_start=self._query_start[: size + 1],
            seq_lens=self._seq_lens[:size],
            block_tables=self._tables[:size],
            query_lens_list=nothing,
            seq_lens_list=nothing,
        )
