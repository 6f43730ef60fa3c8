"""Which models the C++ decoder can run, read from a configuration: transformers' own or `plain_config`'s.

Must not know: weights, requests, the C interface.
"""

from dataclasses import dataclass
from typing import Any

import torch

_MODEL_TYPES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
# Ropes whose angles depend on the position only; all models above form them alike.
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class Unsupported:
    """The decoder cannot run this model; `reason` is a sentence for the log."""

    reason: str


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The numbers that fix a decoder of the Llama family. `windows` has one entry a layer, None for none."""

    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int
    epsilon: float
    windows: tuple[int | None, ...]
    tied_head: bool
    head_norms: bool


def decoder_shape(config: Any) -> DecoderShape | Unsupported:
    """The shape of a model that the decoder computes exactly as transformers does, or why it cannot."""
    reason = _refusal(config)
    if reason is not None:
        return Unsupported(reason)
    heads = config.num_attention_heads
    return DecoderShape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        query_heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_size=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=config.intermediate_size,
        vocabulary=config.vocab_size,
        epsilon=config.rms_norm_eps,
        windows=_windows(config),
        tied_head=bool(config.tie_word_embeddings),
        head_norms=config.model_type == "qwen3",
    )


def _refusal(config: Any) -> str | None:
    if config.model_type not in _MODEL_TYPES:
        return f"models of type {config.model_type} have no fused decoder"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act} has no fused decoder"
    if getattr(config, "mlp_bias", False):
        return "an MLP with bias has no fused decoder"
    if config.num_attention_heads % (config.num_key_value_heads or config.num_attention_heads):
        return "query heads are not a multiple of KV heads"
    rope = config.rope_parameters or {}
    if rope.get("rope_type", "default") not in _ROPE_TYPES:
        return f"rope of type {rope['rope_type']} has no fused decoder"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "a partial rope has no fused decoder"
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    return f"layers of type {', '.join(other)} have no fused decoder" if other else None


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is None or (kinds is None and config.model_type == "llama"):
        return (None,) * config.num_hidden_layers
    if kinds is None:
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def num_weights(shape: DecoderShape) -> int:
    """Numbers in the matrices of a decoder of that shape, embeddings and head included."""
    attention = (2 * shape.query_heads + 2 * shape.kv_heads) * shape.head_size
    layer = shape.hidden * (attention + 3 * shape.intermediate)
    return shape.layers * layer + (1 if shape.tied_head else 2) * shape.vocabulary * shape.hidden


def rotary_tables(config: Any, positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine float32 [positions, head size / 2], with the model's attention factor in them."""
    frequencies, factor = _frequencies(config)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return (angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous()


def _frequencies(config: Any) -> tuple[torch.Tensor, float]:
    """Inverse frequencies float32 [head size / 2] and the factor of both tables."""
    rope = config.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # takes seconds

        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return frequencies.float(), float(factor)
    # Su et al., RoFormer (2021): theta ** (-2 i / d)
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
    return 1.0 / (float(rope.get("rope_theta", 10_000.0)) ** exponents), 1.0
