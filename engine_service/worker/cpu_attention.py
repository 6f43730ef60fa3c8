"""Paged attention by the C++ kernels, for models whose other layers run in torch.

Must not know: the model, requests, plans.
"""

from dataclasses import dataclass

import torch

from engine_service.worker.attention import AttentionBackend, BatchLayout, BlockCopies, KvGeometry, LayerShape
from engine_service.worker.config import Device
from engine_service.worker.kernels.cpu_model import GROUP_SLOTS, PoolSize
from engine_service.worker.kernels.fused_weights import padded_head
from engine_service.worker.kernels.library import BatchStruct, ThreadTeam
from engine_service.worker.kernels.paged_attention import HeadShape, PagedAttention
from engine_service.worker.kernels.step_batch import batch_struct


@dataclass(frozen=True, slots=True)
class CpuAttentionKind:
    """Needs heads of one shape in all layers and float32 or bfloat16."""

    team: ThreadTeam
    devices = frozenset({Device.CPU})
    default_block_size = GROUP_SLOTS

    def refusal(self, layers: tuple[LayerShape, ...], dtype: torch.dtype) -> str | None:
        """Why these layers need the plain attention, or None."""
        if dtype not in (torch.float32, torch.bfloat16):
            return f"the kernels do not compute in {dtype}"
        if len({_head_shape(layer) for layer in layers}) != 1:
            return "the heads differ between layers"
        if any(layer.key_dim != layer.value_dim for layer in layers):
            return "keys and values differ in size"
        return "the scores are soft-capped" if any(layer.softcap for layer in layers) else None

    def check(self, geometry: KvGeometry) -> None:
        PoolSize(1, geometry.block_size)

    def block_bytes(self, geometry: KvGeometry) -> int:
        layer = geometry.layers[0]
        numbers = 2 * len(geometry.layers) * layer.num_kv_heads * padded_head(layer.key_dim) * geometry.block_size
        return numbers * geometry.dtype.itemsize

    def build(self, geometry: KvGeometry, num_blocks: int) -> AttentionBackend[BatchStruct]:
        layers = geometry.layers
        pool = PoolSize(num_blocks, geometry.block_size)
        kernels = PagedAttention(_head_shape(layers[0]), len(layers), pool, geometry.dtype, self.team)
        return CpuAttention(kernels, tuple(layer.sliding_window for layer in layers))


class CpuAttention:
    """AttentionBackend over the kernels' pool."""

    def __init__(self, kernels: PagedAttention, windows: tuple[int | None, ...]) -> None:
        self._kernels = kernels
        self._windows = windows

    def prepare(self, layout: BatchLayout) -> BatchStruct:
        return batch_struct(layout.slot_mapping, layout.block_tables, layout.query_start, layout.seq_lens)

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, step: BatchStruct) -> None:
        self._kernels.write(layer, step, key, value)

    def attend(self, layer: int, query: torch.Tensor, step: BatchStruct) -> torch.Tensor:
        return self._kernels.attend(layer, step, query, self._windows[layer])

    def copy_blocks(self, pairs: BlockCopies) -> None:
        self._kernels.copy_blocks(pairs)


def _head_shape(layer: LayerShape) -> HeadShape:
    return HeadShape(layer.num_query_heads, layer.num_kv_heads, layer.key_dim, layer.scale)
