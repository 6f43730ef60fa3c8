"""One step as the decoder takes and gives it: the batch's tensors, checked, and views of what it computed.

Must not know: weights, how a step runs.
"""

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt
import torch

from engine_service.worker.kernels.library import BatchStruct


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The T tokens of N chunks, flattened; contiguous CPU tensors.

    int64: `input_ids` [T], `positions` [T], `slot_mapping` [T] (place in the pool counted in tokens),
    `sample_rows` [S], ascending. int32: `block_tables` [N, W], `query_start` [N + 1], where each chunk begins,
    `seq_lens` [N], tokens of a request up to and including its chunk. `adapters` [T]: the number of each token's
    adapter, 0: none; None: of no token.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    sample_rows: torch.Tensor
    adapters: npt.NDArray[np.int32] | None = None


_INT64_FIELDS = frozenset({"input_ids", "positions", "slot_mapping", "sample_rows"})


@dataclass(frozen=True, slots=True)
class StepOutput:
    """For the S rows that sample: logits float32 [S, vocabulary]; `best` int64 [S], the lowest index of the
    largest logit, or -1 where a logit of the row is not finite. Views, valid until the next step."""

    logits: torch.Tensor
    best: torch.Tensor


def batch_struct(
    slot_mapping: torch.Tensor, block_tables: torch.Tensor, query_start: torch.Tensor, seq_lens: torch.Tensor
) -> BatchStruct:
    """A view of the four tensors, which must stay alive while it is used."""
    return BatchStruct(
        tokens=slot_mapping.numel(),
        chunks=seq_lens.numel(),
        table_width=block_tables.shape[1],
        slot_mapping=slot_mapping.data_ptr(),
        block_tables=block_tables.data_ptr(),
        query_start=query_start.data_ptr(),
        seq_lens=seq_lens.data_ptr(),
    )


def check(batch: StepBatch) -> None:
    """The kernels read plain memory: a wrong dtype or a stride would be garbage, not an error. ValueError for one."""
    for field in fields(batch):
        tensor = getattr(batch, field.name)
        if not isinstance(tensor, torch.Tensor):
            continue
        wanted = torch.int64 if field.name in _INT64_FIELDS else torch.int32
        if tensor.dtype is not wanted or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"{field.name} must be a contiguous {wanted} CPU tensor")
