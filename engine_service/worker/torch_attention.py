"""Paged attention in plain torch operations: the reference, and the fallback where no kernel fits.

Each request is attended alone, so that no row depends on a neighbour.
Must not know: the model, plans, how the batch was put together.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine_service.worker.attention import AttentionBackend, BatchLayout, BlockCopies, KvGeometry, LayerShape
from engine_service.worker.config import Device
from engine_service.worker.kv_storage import LayerKv, allocate_kv, kv_bytes_per_block


@dataclass(frozen=True, slots=True)
class _RequestView:
    """One chunk: rows `begin`..`end` of the batch see keys `first`..`last` of the gathered `blocks`.

    `mask` bool [rows, keys] says which; None where every row sees every key.
    """

    begin: int
    end: int
    blocks: torch.Tensor
    first: int
    last: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class TorchStep:
    """The step's slots, and its chunks as seen through each sliding window that occurs in the model."""

    slot_mapping: torch.Tensor
    views: dict[int | None, list[_RequestView]]


class TorchAttention:
    """Gathers each request's blocks with `index_select`, then attends with the heads of a group as rows."""

    def __init__(self, geometry: KvGeometry, num_blocks: int) -> None:
        self._geometry = geometry
        self._layers: tuple[LayerKv, ...] = allocate_kv(geometry, num_blocks)
        self._windows = {layer.sliding_window for layer in geometry.layers}

    def prepare(self, layout: BatchLayout) -> TorchStep:
        views = {window: self._request_views(layout, window) for window in self._windows}
        return TorchStep(layout.slot_mapping, views)

    def write_kv(self, layer: int, key: torch.Tensor, value: torch.Tensor, step: TorchStep) -> None:
        kv = self._layers[layer]
        kv.keys.flatten(0, 1).index_copy_(0, step.slot_mapping, key)
        kv.values.flatten(0, 1).index_copy_(0, step.slot_mapping, value)

    def attend(self, layer: int, query: torch.Tensor, step: TorchStep) -> torch.Tensor:
        shape = self._geometry.layers[layer]
        kv = self._layers[layer]
        out = query.new_empty(query.shape[0], shape.num_query_heads, shape.value_dim)
        for view in step.views[shape.sliding_window]:
            keys = kv.keys.index_select(0, view.blocks).flatten(0, 1)[view.first : view.last]
            values = kv.values.index_select(0, view.blocks).flatten(0, 1)[view.first : view.last]
            out[view.begin : view.end] = _attend_one(query[view.begin : view.end], keys, values, view.mask, shape)
        return out

    def copy_blocks(self, pairs: BlockCopies) -> None:
        sources, destinations = torch.tensor(pairs, device=self._geometry.device).unbind(1)
        for kv in self._layers:
            kv.keys.index_copy_(0, destinations, kv.keys.index_select(0, sources))
            kv.values.index_copy_(0, destinations, kv.values.index_select(0, sources))

    def _request_views(self, layout: BatchLayout, window: int | None) -> list[_RequestView]:
        views = []
        begin = 0
        for row, (length, seq_len) in enumerate(zip(layout.query_lens_list, layout.seq_lens_list, strict=True)):
            views.append(self._view(layout.block_tables[row], begin, length, seq_len, window))
            begin += length
        return views

    def _view(self, table: torch.Tensor, begin: int, length: int, seq_len: int, window: int | None) -> _RequestView:
        size = self._geometry.block_size
        start = seq_len - length
        oldest = 0 if window is None else max(0, start - window + 1)
        first_block = oldest // size
        return _RequestView(
            begin=begin,
            end=begin + length,
            blocks=table[first_block : (seq_len + size - 1) // size],
            first=oldest - first_block * size,
            last=seq_len - first_block * size,
            mask=None if length == 1 else _causal_mask(start, length, oldest, window, table.device),
        )


class TorchAttentionKind:
    """Runs wherever torch runs, for any geometry."""

    devices = frozenset({Device.CPU, Device.CUDA})
    default_block_size = 16

    def check(self, geometry: KvGeometry) -> None:
        """Nothing is out of reach of the reference."""

    def block_bytes(self, geometry: KvGeometry) -> int:
        return kv_bytes_per_block(geometry)

    def build(self, geometry: KvGeometry, num_blocks: int) -> AttentionBackend:
        return TorchAttention(geometry, num_blocks)


def _causal_mask(start: int, length: int, oldest: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Bool [length, keys]: rows are positions start.., columns are positions oldest .. start + length - 1."""
    query = torch.arange(start, start + length, device=device).unsqueeze(1)
    key = torch.arange(oldest, start + length, device=device).unsqueeze(0)
    mask = key <= query
    return mask if window is None else mask & (key > query - window)


def _attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    shape: LayerShape,
) -> torch.Tensor:
    """[n, query heads, d] against [L, kv heads, d] -> [n, query heads, value dim].

    The G query heads that share a KV head become rows beside the n positions, so KV is never repeated.
    """
    rows, group = query.shape[0], shape.num_query_heads // shape.num_kv_heads
    grouped = query.view(rows, shape.num_kv_heads, group, -1).permute(1, 2, 0, 3).flatten(1, 2)
    row_mask = None if mask is None else mask.repeat(group, 1)
    attended = _softmax_attention(grouped, keys.transpose(0, 1), values.transpose(0, 1), row_mask, shape)
    by_row = attended.view(shape.num_kv_heads, group, rows, -1).permute(2, 0, 1, 3)
    return by_row.reshape(rows, shape.num_query_heads, -1)


def _softmax_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    shape: LayerShape,
) -> torch.Tensor:
    """[heads, rows, d] x [heads, L, d] -> [heads, rows, value dim]."""
    if shape.softcap is None:
        batched = (query.unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0))
        return F.scaled_dot_product_attention(*batched, attn_mask=mask, scale=shape.scale).squeeze(0)
    scores = torch.matmul(query, keys.transpose(1, 2)).float() * shape.scale
    scores = torch.tanh(scores / shape.softcap) * shape.softcap
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    return torch.matmul(torch.softmax(scores, dim=-1).to(query.dtype), values)
