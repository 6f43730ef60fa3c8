"""Paged attention written out in torch with nothing but tensors: what other kernels are compared with.

Slow, but it reads nothing from the host: it also takes the place of a kernel where a graph is rehearsed on a CPU.
Must not know: kernels of a device, graphs, requests.
"""

from collections.abc import Sequence

import torch

from engine_service.worker.attention import LayerShape
from engine_service.worker.cuda.kernel import Attend, KernelStep
from engine_service.worker.cuda.pages import PageRule

_TOKENS_AT_ONCE = 32  # bounds what is gathered: [tokens, table width * page size, heads, size]


class DenseKernel:
    """In float64, whatever the pool holds. Pages of 16 tokens at most, so that larger blocks are cut up."""

    name = "dense"
    pages = PageRule(largest=16)
    default_block_size = 16
    is_static = True

    def refusal(self, layers: Sequence[LayerShape], dtype: torch.dtype) -> str | None:
        return None

    def start(self, step: KernelStep) -> Attend:
        tokens = torch.arange(len(step.slot_mapping), device=step.tables.device)
        chunks = torch.searchsorted(step.query_start[1:].long(), tokens, right=True)
        # A chunk's last token is its request's last: count back from there.
        positions = step.seq_lens[chunks] - (step.query_start[chunks + 1] - tokens)
        tables = step.tables[chunks]

        def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: LayerShape) -> torch.Tensor:
            parts = [
                _attend(query[part], keys, values, tables[part], positions[part], shape)
                for part in tokens.split(_TOKENS_AT_ONCE)
            ]
            return torch.cat(parts)

        return attend


def _attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    shape: LayerShape,
) -> torch.Tensor:
    """Each of n tokens against its own table: [n, heads, d], int32 [n, P], [n] -> [n, heads, value dim]."""
    count, width = tables.shape
    group = shape.num_query_heads // shape.num_kv_heads
    flat = tables.flatten()
    seen_keys = keys.index_select(0, flat).view(count, -1, *keys.shape[2:]).double()
    seen_values = values.index_select(0, flat).view(count, -1, *values.shape[2:]).double()
    grouped = query.double().view(count, shape.num_kv_heads, group, -1)
    scores = torch.einsum("nhgd,nlhd->nhgl", grouped, seen_keys) * shape.scale
    if shape.softcap is not None:
        scores = torch.tanh(scores / shape.softcap) * shape.softcap
    places = torch.arange(width * keys.shape[1], device=query.device).unsqueeze(0)
    visible = places <= positions.unsqueeze(1)
    if shape.sliding_window is not None:
        visible &= places > positions.unsqueeze(1) - shape.sliding_window
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    # What is beyond a request may be anything, also NaN: its weight of 0 would not remove it.
    seen_values = seen_values.masked_fill(~visible[:, :, None, None], 0.0)
    out = torch.einsum("nhgl,nlhd->nhgd", torch.softmax(scores, dim=-1), seen_values)
    return out.reshape(count, shape.num_query_heads, -1).to(query.dtype)
