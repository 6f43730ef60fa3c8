"""A checkpoint's matrices as the decoder wants them: fused, heads padded, gate and up rows interleaved.

Must not know: the C interface, how a step runs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine_service.worker.kernels.decoder_shape import DecoderShape

# The kernels' tiles: heads are padded to 32 numbers, gate and up rows alternate in groups of 16.
_HEAD_MULTIPLE = 32
_LANES = 16


@dataclass(frozen=True, slots=True)
class FusedLayer:
    """One layer. Vectors are float32, matrices have the decoder's dtype; None where the model has none."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def padded_head(head_size: int) -> int:
    """Numbers of a head in the fused matrices and in the KV pool."""
    return -(-head_size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE


def fuse_layer(weights: Mapping[str, torch.Tensor], layer: int, shape: DecoderShape, dtype: torch.dtype) -> FusedLayer:
    """Layer `layer` of a checkpoint with the names that transformers gives. KeyError if one is missing."""
    prefix = f"model.layers.{layer}"
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    heads = {"q": shape.query_heads, "k": shape.kv_heads, "v": shape.kv_heads}
    qkv = [pad_rows(weights[f"{attention}.{name}_proj.weight"], count) for name, count in heads.items()]
    has_bias = f"{attention}.q_proj.bias" in weights
    biases = [pad_rows(weights[f"{attention}.{n}_proj.bias"], c) for n, c in heads.items()] if has_bias else []
    norms = [weights[f"{attention}.{n}_norm.weight"].float() if shape.head_norms else None for n in "qk"]
    output_bias = weights.get(f"{attention}.o_proj.bias")
    return FusedLayer(
        input_norm=weights[f"{prefix}.input_layernorm.weight"].float().contiguous(),
        qkv=torch.cat(qkv).to(dtype).contiguous(),
        qkv_bias=torch.cat(biases).float().contiguous() if has_bias else None,
        query_norm=norms[0],
        key_norm=norms[1],
        output=pad_columns(weights[f"{attention}.o_proj.weight"], shape.query_heads).to(dtype).contiguous(),
        output_bias=None if output_bias is None else output_bias.float().contiguous(),
        post_norm=weights[f"{prefix}.post_attention_layernorm.weight"].float().contiguous(),
        gate_up=interleave(weights[f"{mlp}.gate_proj.weight"], weights[f"{mlp}.up_proj.weight"]).to(dtype),
        down=weights[f"{mlp}.down_proj.weight"].to(dtype).contiguous(),
    )


def pad_rows(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    """[heads * size, ...] -> [heads * padded size, ...]; also for a bias [heads * size]."""
    size = matrix.shape[0] // heads
    split = matrix.view(heads, size, -1)
    padded = _pad(split, (0, 0, 0, padded_head(size) - size))
    return padded.reshape(heads * padded_head(size), *matrix.shape[1:])


def pad_columns(matrix: torch.Tensor, heads: int) -> torch.Tensor:
    size = matrix.shape[1] // heads
    split = matrix.view(matrix.shape[0], heads, size)
    return _pad(split, (0, padded_head(size) - size)).reshape(matrix.shape[0], heads * padded_head(size))


def interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Two [intermediate, hidden] -> [2 * intermediate rounded up to 16, hidden]: 16 gate rows, 16 up rows, ..."""
    missing = -gate.shape[0] % _LANES
    gate, up = _pad(gate, (0, 0, 0, missing)), _pad(up, (0, 0, 0, missing))
    groups = gate.shape[0] // _LANES
    both = torch.stack([gate.view(groups, _LANES, -1), up.view(groups, _LANES, -1)], dim=1)
    return both.reshape(2 * gate.shape[0], -1).contiguous()


def _pad(tensor: torch.Tensor, widths: tuple[int, ...]) -> torch.Tensor:
    """torch would copy a tensor also where there is nothing to add: a third of the time to pack a model."""
    return functional.pad(tensor, widths) if any(widths) else tensor
