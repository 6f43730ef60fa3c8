"""An adapter's updates as the decoder wants them: one pair of matrices for each fused matrix of a layer.

Updates of matrices that are fused stand beside each other: the first matrices stacked, the second ones in blocks with
zeros around them. Must not know: the C interface, how a step runs.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

import torch

from engine_service.worker.kernels.decoder_shape import DecoderShape
from engine_service.worker.kernels.fused_weights import interleave, pad_columns, pad_rows, padded_head
from engine_service.worker.lora.adapter import Adapter, LinearShape


class Fused(IntEnum):
    """Fused of lora.hpp."""

    QKV = 0
    OUTPUT = 1
    GATE_UP = 2
    DOWN = 3


class FusedUpdate(NamedTuple):
    """`down` [rank, inputs], `up` [outputs, rank] with the scale in it; contiguous, of the decoder's dtype."""

    layer: int
    part: Fused
    down: torch.Tensor
    up: torch.Tensor


def linear_shapes(shape: DecoderShape) -> dict[str, LinearShape]:
    """The layers that an adapter may change, by the names that transformers gives them."""
    heads, kv_heads = shape.query_heads * shape.head_size, shape.kv_heads * shape.head_size
    sizes = {
        "self_attn.q_proj": LinearShape(shape.hidden, heads),
        "self_attn.k_proj": LinearShape(shape.hidden, kv_heads),
        "self_attn.v_proj": LinearShape(shape.hidden, kv_heads),
        "self_attn.o_proj": LinearShape(heads, shape.hidden),
        "mlp.gate_proj": LinearShape(shape.hidden, shape.intermediate),
        "mlp.up_proj": LinearShape(shape.hidden, shape.intermediate),
        "mlp.down_proj": LinearShape(shape.intermediate, shape.hidden),
    }
    return {f"model.layers.{layer}.{name}": size for layer in range(shape.layers) for name, size in sizes.items()}


def fuse_adapter(adapter: Adapter, shape: DecoderShape, dtype: torch.dtype) -> Iterator[FusedUpdate]:
    """The updates of all layers, one at a time."""
    for layer in range(shape.layers):
        for part, pair in _fused_pairs(adapter, f"model.layers.{layer}", shape):
            down, up = (matrix.to(dtype).contiguous() for matrix in pair)
            yield FusedUpdate(layer, part, down, up)


def _fused_pairs(
    adapter: Adapter, prefix: str, shape: DecoderShape
) -> Iterator[tuple[Fused, tuple[torch.Tensor, torch.Tensor]]]:
    updates = adapter.updates
    qkv = {f"{prefix}.self_attn.{name}_proj": heads for name, heads in _heads(shape).items()}
    if qkv.keys() & updates.keys():
        rows = {name: heads * padded_head(shape.head_size) for name, heads in qkv.items()}
        ups = [pad_rows(adapter.scaled_up(name), heads) if name in updates else None for name, heads in qkv.items()]
        yield Fused.QKV, (_stacked(adapter, list(qkv)), torch.cat(_in_blocks(ups, list(rows.values()), adapter.rank)))
    output = f"{prefix}.self_attn.o_proj"
    if output in updates:
        yield Fused.OUTPUT, (pad_columns(updates[output].down, shape.query_heads), adapter.scaled_up(output))
    gate_up = [f"{prefix}.mlp.{name}_proj" for name in ("gate", "up")]
    if any(name in updates for name in gate_up):
        ups = [adapter.scaled_up(name) if name in updates else None for name in gate_up]
        gate, up = _in_blocks(ups, [shape.intermediate] * 2, adapter.rank)
        yield Fused.GATE_UP, (_stacked(adapter, gate_up), interleave(gate, up))
    down = f"{prefix}.mlp.down_proj"
    if down in updates:
        yield Fused.DOWN, (updates[down].down, adapter.scaled_up(down))


def _heads(shape: DecoderShape) -> dict[str, int]:
    return {"q": shape.query_heads, "k": shape.kv_heads, "v": shape.kv_heads}


def _stacked(adapter: Adapter, names: list[str]) -> torch.Tensor:
    return torch.cat([adapter.updates[name].down.float() for name in names if name in adapter.updates])


def _in_blocks(ups: list[torch.Tensor | None], outputs: list[int], rank: int) -> list[torch.Tensor]:
    """Each [outputs, rank] in columns of its own; None, which has no columns, gives zeros."""
    width = rank * sum(up is not None for up in ups)
    blocks, column = [], 0
    for up, rows in zip(ups, outputs, strict=True):
        block = torch.zeros(rows, width)
        if up is not None:
            block[:, column : column + rank] = up
            column += rank
        blocks.append(block)
    return blocks
