"""Reads the config.json of plain Llama, Mistral, Qwen2 and Qwen3 models: transformers takes seconds to import.

Must not know: weights, requests, what the numbers are used for.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Tuples, because a file may hold values that no set can be asked about.
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_KEYS = frozenset({"rope_type", "rope_theta"})


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """The attributes of a transformers configuration that a fused decoder needs, by the same names and values."""

    model_type: str
    architectures: list[str] | None
    dtype: torch.dtype | None
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    mlp_bias: bool
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    rope_parameters: dict[str, object]
    sliding_window: int | None
    layer_types: list[str] | None
    bos_token_id: int | None
    eos_token_id: int | list[int] | None


class _NotPlain(Exception):
    """Only transformers can tell: a default of its own, a scaled rope, a value of an unusual kind."""


def read_plain_config(folder: Path) -> PlainConfig | None:
    """None for a file that says less, or other things, than plain models do: transformers has to read it."""
    try:
        content = json.loads((folder / "config.json").read_bytes())
        return _parse(content) if isinstance(content, dict) else None
    except (_NotPlain, ValueError, OSError):
        return None


def _parse(content: Mapping[str, Any]) -> PlainConfig:
    family = content.get("model_type")
    if family not in _FAMILIES or "partial_rotary_factor" in content:
        raise _NotPlain
    sizes = {name: _size(content, name) for name in _SIZES}
    window, layer_types = _attention(content, sizes["num_hidden_layers"])
    return PlainConfig(
        model_type=family,
        architectures=_architectures(content),
        dtype=_dtype(content),
        **sizes,
        head_dim=_head_dim(content, sizes["hidden_size"], sizes["num_attention_heads"]),
        hidden_act=_of_type(content, "hidden_act", str),
        mlp_bias=_flag(content, "mlp_bias"),
        rms_norm_eps=_of_type(content, "rms_norm_eps", float),
        tie_word_embeddings=_flag(content, "tie_word_embeddings"),
        rope_parameters=_rope(content),
        sliding_window=window,
        layer_types=layer_types,
        bos_token_id=_token(content, "bos_token_id"),
        eos_token_id=_end_tokens(content),
    )


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)


def _of_type(content: Mapping[str, Any], name: str, kind: type) -> Any:
    value = content.get(name)
    if type(value) is not kind:  # a bool is no int here
        raise _NotPlain
    return value


def _size(content: Mapping[str, Any], name: str) -> int:
    value: int = _of_type(content, name, int)
    if value < 1:
        raise _NotPlain
    return value


def _flag(content: Mapping[str, Any], name: str) -> bool:
    """False where it is not given: the default of all four families."""
    return bool(_of_type(content, name, bool)) if name in content else False


def _head_dim(content: Mapping[str, Any], hidden: int, heads: int) -> int:
    if hidden % heads or (content["model_type"] == "qwen3" and "head_dim" not in content):
        raise _NotPlain
    size = _size(content, "head_dim") if "head_dim" in content else hidden // heads
    if size % 2:
        raise _NotPlain
    return size


def _rope(content: Mapping[str, Any]) -> dict[str, object]:
    """The unscaled rope, in the newer form (`rope_parameters`) or the older one (`rope_theta` beside no scaling)."""
    given = content.get("rope_parameters")
    if content.get("rope_scaling") is not None or (given is not None and "rope_theta" in content):
        raise _NotPlain
    rope = {"rope_theta": content.get("rope_theta"), "rope_type": "default"} if given is None else given
    if not isinstance(rope, dict) or rope.keys() != _ROPE_KEYS or rope["rope_type"] != "default":
        raise _NotPlain
    if type(rope["rope_theta"]) not in (int, float) or rope["rope_theta"] < 1:
        raise _NotPlain
    return rope


def _attention(content: Mapping[str, Any], layers: int) -> tuple[int | None, list[str] | None]:
    """The sliding window, and which layers have it; None: transformers gives this family no such list."""
    family = content["model_type"]
    if family in ("llama", "mistral"):
        if "layer_types" in content or (family == "llama" and "sliding_window" in content):
            raise _NotPlain
        return (None if family == "llama" else _window(content)), None
    is_sliding = _flag(content, "use_sliding_window")
    given = _window(content) if is_sliding or "sliding_window" in content else None
    window = given if is_sliding else None
    first = _of_type(content, "max_window_layers", int) if is_sliding or "max_window_layers" in content else layers
    kinds = content.get("layer_types")
    if kinds is None:
        first = first if window is not None else layers
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or not all(kind in _LAYER_TYPES for kind in kinds):
        raise _NotPlain
    return window, kinds


def _window(content: Mapping[str, Any]) -> int | None:
    if "sliding_window" in content and content["sliding_window"] is None:
        return None
    return _size(content, "sliding_window")


def _architectures(content: Mapping[str, Any]) -> list[str] | None:
    names = content.get("architectures")
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _NotPlain
    return names


def _dtype(content: Mapping[str, Any]) -> torch.dtype | None:
    names = [content[key] for key in ("dtype", "torch_dtype") if content.get(key) is not None]
    if not names:
        return None
    if len(names) > 1 or not isinstance(names[0], str) or names[0] not in _DTYPES:
        raise _NotPlain
    return _DTYPES[names[0]]


def _token(content: Mapping[str, Any], name: str) -> int | None:
    if name not in content:
        raise _NotPlain  # the families' defaults differ
    return None if content[name] is None else int(_of_type(content, name, int))


def _end_tokens(content: Mapping[str, Any]) -> int | list[int] | None:
    value = content.get("eos_token_id")
    if not isinstance(value, list):
        return _token(content, "eos_token_id")
    if not all(type(token) is int for token in value):
        raise _NotPlain
    return value
