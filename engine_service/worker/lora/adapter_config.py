"""The adapter_config.json of a PEFT folder: what of it is served, and what is refused, by name.

Must not know: tensors, the model.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

MAX_CONFIG_BYTES = 1_000_000
MAX_ALPHA = 1_000_000

# Fields that change nothing when a trained adapter is applied.
_IGNORED = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "lora_dropout",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
    }
)
_READ = frozenset(
    {"peft_type", "task_type", "r", "lora_alpha", "use_rslora", "target_modules", "bias", "init_lora_weights"}
)
# Others start from weights that they take out of the model: its folder alone does not have what is left.
_STARTS = (None, True, False, "gaussian", "eva", "orthogonal")


class BadAdapter(ValueError):
    """The adapter cannot be served; the message says which field, in words for the operator."""


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """`targets` are last parts of layers' names; None: the tensors alone say which layers."""

    rank: int
    scale: float
    targets: frozenset[str] | None


def read_adapter_config(text: bytes, max_rank: int) -> AdapterConfig:
    """Raises BadAdapter."""
    fields = _object(text)
    _require(fields, "peft_type", ("LORA",))
    _require(fields, "task_type", (None, "CAUSAL_LM"))
    _require(fields, "bias", (None, "none"))
    _require(fields, "init_lora_weights", _STARTS)
    for name, value in fields.items():
        if name not in _IGNORED and name not in _READ and value:
            raise BadAdapter(f"{name} is {_shown(value)}, which is not supported")
    rank = fields.get("r")
    if type(rank) is not int or not 1 <= rank <= max_rank:
        raise BadAdapter(f"r is {_shown(rank)}; it has to be 1..{max_rank} (--max-lora-rank)")
    alpha = fields.get("lora_alpha")
    # JSON has whole numbers that no float can hold.
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= MAX_ALPHA:
        raise BadAdapter(f"lora_alpha is {_shown(alpha)}; it has to be a number, {MAX_ALPHA:,} at most")
    _require(fields, "use_rslora", (None, False, True))
    # Kalajdzievski, rank-stabilised LoRA (2023): alpha / sqrt(r).
    scale = alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)
    return AdapterConfig(rank, scale, _targets(fields.get("target_modules")))


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise BadAdapter("adapter_config.json is no JSON object")
    return found


def _require(fields: dict[str, Any], name: str, allowed: tuple[object, ...]) -> None:
    value = fields.get(name)
    if not any(value is each if isinstance(each, bool) or each is None else value == each for each in allowed):
        raise BadAdapter(f"{name} is {_shown(value)}, which is not supported")


def _targets(value: object) -> frozenset[str] | None:
    """A string is a pattern, or "all-linear": the tensors say what it matched."""
    if isinstance(value, str):
        return None
    if not isinstance(value, list) or not value or not all(isinstance(name, str) for name in value):
        raise BadAdapter(f"target_modules is {_shown(value)}; it has to be a list of names, or a pattern")
    return frozenset(value)


def _shown(value: object) -> str:
    return "unset" if value is None else f"{json.dumps(value)[:80]}"
