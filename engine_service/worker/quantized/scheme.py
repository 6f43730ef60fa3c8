"""Reads `quantization_config` of a config.json: how a checkpoint's weights were quantized, or why they are not read.

Must not know: tensors, models, devices.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from engine_service.worker.checkpoint import UnsupportedModelError

_BITS = (4, 8)
_PLACE = "quantization_config"


class Layout(Enum):
    """How codes lie in the tensors of a file."""

    GPTQ = "gptq"
    AWQ = "awq"
    PACKED = "pack-quantized"
    INTEGERS = "int-quantized"


@dataclass(frozen=True, slots=True)
class Scheme:
    """Weight = scale * (code - zero), with a scale and a zero for every `group_size` inputs (None: all inputs).

    `zero_offset` is what has to be added to stored zeros; `is_symmetric`: no zeros are stored (compressed-tensors).
    """

    layout: Layout
    bits: int
    group_size: int | None
    zero_offset: int = 0
    is_symmetric: bool = False

    @property
    def summary(self) -> str:
        """For logs and model information, such as "gptq, 4 bits, groups of 128"."""
        groups = "one scale a row" if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.layout.value}, {self.bits} bits, {groups}"


def read_scheme(folder: Path) -> Scheme | None:
    """None for a checkpoint that is not quantized. UnsupportedModelError names the field that cannot be served."""
    try:
        content = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None  # said by whoever reads the configuration
    given = content.get(_PLACE) if isinstance(content, dict) else None
    if given is None:
        return None
    if not isinstance(given, dict):
        raise UnsupportedModelError(f"{_PLACE} has to be an object")
    method = given.get("quant_method")
    parse = _PARSERS.get(method) if isinstance(method, str) else None
    if parse is None:
        raise _refusal("quant_method", method, " or ".join(_PARSERS))
    return parse(given)


def _gptq(given: Mapping[str, Any]) -> Scheme:
    _require_empty(given, "dynamic", "adapter", "rotation")
    _one_of(given, "pack_dtype", ("int32",), default="int32")
    name = "checkpoint_format" if "checkpoint_format" in given else "format"
    file_format = _one_of(given, name, ("gptq", "gptq_v2"), default="gptq")
    bits = _one_of(given, "bits", _BITS)
    # The first version of the format stores zeros less one.
    return Scheme(Layout.GPTQ, bits, _group_size(given, "group_size"), zero_offset=int(file_format == "gptq"))


def _awq(given: Mapping[str, Any]) -> Scheme:
    _one_of(given, "version", ("gemm", "GEMM"), default="gemm")
    _one_of(given, "zero_point", (True,), default=True)
    bits = _one_of(given, "bits" if "bits" in given else "w_bit", (4,))
    return Scheme(Layout.AWQ, bits, _group_size(given, "group_size" if "group_size" in given else "q_group_size"))


def _compressed_tensors(given: Mapping[str, Any]) -> Scheme:
    _require_empty(given, "kv_cache_scheme", "sparsity_config", "transform_config")
    layouts = (Layout.PACKED.value, Layout.INTEGERS.value)
    layout = Layout(_one_of(given, "format", layouts))
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        count = len(groups) if isinstance(groups, dict) else groups
        raise _refusal("config_groups", count, "one group")
    ((name, group),) = groups.items()
    place = f"config_groups.{name}"
    if not isinstance(group, dict) or not isinstance(group.get("weights"), dict):
        raise _refusal(f"{place}.weights", None, "an object")
    _require_empty(group, "input_activations", "output_activations", place=f"{place}.")
    _one_of(group, "format", (layout.value, None), default=None, place=f"{place}.")
    return _compressed_weights(group["weights"], layout, f"{place}.weights.")


def _compressed_weights(weights: Mapping[str, Any], layout: Layout, place: str) -> Scheme:
    _one_of(weights, "type", ("int",), default="int", place=place)
    _one_of(weights, "dynamic", (False,), default=False, place=place)
    strategy = _one_of(weights, "strategy", ("group", "channel"), place=place)
    bits = _one_of(weights, "num_bits", _BITS if layout is Layout.PACKED else (8,), place=place)
    symmetric = _one_of(weights, "symmetric", (True, False), default=True, place=place)
    size = _group_size(weights, "group_size", place) if strategy == "group" else None
    return Scheme(layout, bits, size, is_symmetric=symmetric)


_PARSERS = {"gptq": _gptq, "awq": _awq, "compressed-tensors": _compressed_tensors}
_MISSING = object()


def _one_of(
    given: Mapping[str, Any], name: str, values: tuple[Any, ...], default: Any = _MISSING, place: str = ""
) -> Any:
    value = given.get(name, default)
    # 1 == True, so the kinds are compared, too.
    if not any(type(value) is type(wanted) and value == wanted for wanted in values):
        shown = None if value is _MISSING else value
        raise _refusal(place + name, shown, " or ".join(str(wanted) for wanted in values if wanted is not None))
    return value


def _group_size(given: Mapping[str, Any], name: str, place: str = "") -> int | None:
    size = given.get(name)
    if type(size) is not int or size == 0 or size < -1:
        raise _refusal(place + name, size, "a positive number, or -1 for a whole row")
    return None if size == -1 else size


def _require_empty(given: Mapping[str, Any], *names: str, place: str = "") -> None:
    for name in names:
        if given.get(name):
            raise _refusal(place + name, "set", "nothing there")


def _refusal(name: str, value: object, wanted: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{_PLACE}.{name} is {value!r:.60}, which is not supported; it has to be {wanted}")
