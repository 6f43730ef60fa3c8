"""A checkpoint's matrices as the decoder wants them: fused, heads padded, gate and up rows interleaved.

Must not know: the C interface, how a step runs.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional

from engine_service.worker.kernels.decoder_shape import DecoderShape

# The kernels' tiles: heads are padded to 32 numbers, gate and up rows alternate in groups of 16.
_HEAD_MULTIPLE = 32
_LANES = 16


def padded_head(head_size: int) -> int:
    """Numbers of a head in the fused matrices and in the KV pool."""
    return -(-head_size // _HEAD_MULTIPLE) * _HEAD_MULTIPLE


def fuse_vectors(weights: Mapping[str, torch.Tensor], layer: int, shape: DecoderShape) -> dict[str, torch.Tensor]:
    """float32, those that the model has, of a checkpoint with the names that transformers gives. KeyError if one is
    missing."""
    prefix = f"model.layers.{layer}"
    attention = f"{prefix}.self_attn"
    found = {
        "input_norm": weights[f"{prefix}.input_layernorm.weight"],
        "post_norm": weights[f"{prefix}.post_attention_layernorm.weight"],
    }
    if f"{attention}.q_proj.bias" in weights:
        heads = {"q": shape.query_heads, "k": shape.kv_heads, "v": shape.kv_heads}
        found["qkv_bias"] = torch.cat([pad_rows(weights[f"{attention}.{n}_proj.bias"], c) for n, c in heads.items()])
    if shape.head_norms:
        found["query_norm"], found["key_norm"] = (weights[f"{attention}.{n}_norm.weight"] for n in "qk")
    if f"{attention}.o_proj.bias" in weights:
        found["output_bias"] = weights[f"{attention}.o_proj.bias"]
    return {name: vector.float().contiguous() for name, vector in found.items()}


def fuse_matrices(
    weights: Mapping[str, torch.Tensor], layer: int, shape: DecoderShape, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    """The four of a layer in the decoder's `dtype`. KeyError if one is missing."""
    attention, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
    heads = {"q": shape.query_heads, "k": shape.kv_heads, "v": shape.kv_heads}
    qkv = [pad_rows(weights[f"{attention}.{name}_proj.weight"], count) for name, count in heads.items()]
    return {
        "qkv": torch.cat(qkv).to(dtype).contiguous(),
        "output": pad_columns(weights[f"{attention}.o_proj.weight"], shape.query_heads).to(dtype).contiguous(),
        "gate_up": interleave(weights[f"{mlp}.gate_proj.weight"], weights[f"{mlp}.up_proj.weight"]).to(dtype),
        "down": weights[f"{mlp}.down_proj.weight"].to(dtype).contiguous(),
    }


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
