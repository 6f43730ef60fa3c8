"""The interface between the model and whatever holds and reads the KV cache.

A backend owns the layout of the KV pool, the block size it likes, writing and attending. Model and
worker only pass it flattened tensors and the layout of the step.
Must not know: a device's layout, the model, requests, plans.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

from engine_service.worker.config import Device

StepT = TypeVar("StepT")

BlockCopies = Sequence[tuple[int, int]]
"""Pairs (source block, destination block); no destination is a source, and each is named once."""


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Attention of one layer: head counts, sizes of a head, and how the scores are formed.

    Scores are `query . key * scale`, then `softcap * tanh(scores / softcap)` when softcap is given. With a
    sliding window of w, position i sees positions i - w + 1 .. i; without, 0 .. i.
    """

    num_query_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None


@dataclass(frozen=True, slots=True)
class KvGeometry:
    """All that decides how big a block is; `layers` in the order of the model's layer numbers."""

    layers: tuple[LayerShape, ...]
    block_size: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """Where the T tokens of a step's N chunks lie, in the order of the plan (decodes first).

    Tensors are on the device: `slot_mapping` int64 [T], a token's place in the pool counted in tokens;
    `query_start` int32 [N + 1], where each chunk begins in the flattened batch; `seq_lens` int32 [N],
    tokens of the request up to and including the chunk; `block_tables` int32 [N, W], the first
    ceil(seq_len / block_size) entries of a row are valid. The lists are the same numbers for the host.
    """

    slot_mapping: torch.Tensor
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    query_lens_list: Sequence[int]
    seq_lens_list: Sequence[int]


class AttentionBackend(Protocol, Generic[StepT]):
    """Paged attention on one device. `StepT` is what it prepares once a step for all layers."""

    def prepare(self, layout: BatchLayout) -> StepT:
        """What `write_kv` and `attend` need for this step; once per step, before the first layer."""
        ...

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, step: StepT) -> None:
        """Store KV of the step's tokens: key [T, kv heads, key dim], value alike; may be strided."""
        ...

    def attend(self, layer: int, query: torch.Tensor, step: StepT) -> torch.Tensor:
        """Causal attention of each token over its own request.

        `query` [T, query heads, key dim] -> [T, query heads, value dim]. The step's KV is written before.
        """
        ...

    def copy_blocks(self, pairs: BlockCopies) -> None:
        """Copy whole blocks of every layer, before the next step."""
        ...


class AttentionKind(Protocol):
    """A registered kind of backend: what is known before there is a pool, and how to build it."""

    @property
    def devices(self) -> frozenset[Device]: ...

    @property
    def default_block_size(self) -> int: ...

    def check(self, geometry: KvGeometry) -> None:
        """Raise ValueError with the numbers if this kind cannot serve the geometry."""
        ...

    def block_bytes(self, geometry: KvGeometry) -> int:
        """Bytes of one block over all layers."""
        ...

    def build(self, geometry: KvGeometry, num_blocks: int) -> AttentionBackend:
        """Allocate the pool."""
        ...
