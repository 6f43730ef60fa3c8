"""Reads an adapter from a PEFT folder, checked against the model: safetensors alone, nothing is unpickled.

Must not know: the device, how an adapter is applied, requests.
"""

import re
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from engine_service.worker.lora.adapter import Adapter, LinearShape, LinearShapes, LowRank
from engine_service.worker.lora.adapter_config import (
    MAX_CONFIG_BYTES,
    AdapterConfig,
    BadAdapter,
    read_adapter_config,
)

_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(?P<layer>.+)\.lora_(?P<side>[AB])\.weight")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HEADER_BYTES = 16 * 1024 * 1024
_NAMED = 3


def read_adapter(folder: Path, shapes: LinearShapes, max_rank: int) -> Adapter:
    """The adapter in `folder`. BadAdapter, which names field or tensor but no path, for one that cannot be served."""
    config_bytes = _read(folder / _CONFIG, MAX_CONFIG_BYTES)
    config = read_adapter_config(config_bytes, max_rank)
    numbers = sum(shape.inputs + shape.outputs for shape in shapes.values()) * max_rank
    data = _read(folder / _WEIGHTS, 4 * numbers + _HEADER_BYTES)
    try:
        tensors = load(data)
    except SafetensorError as error:
        raise BadAdapter(f"{_WEIGHTS} cannot be read: {error}") from None
    except KeyError as error:  # a type that the format knows and torch does not
        raise BadAdapter(f"{_WEIGHTS} has numbers of type {error.args[0]}") from None
    updates = _updates(tensors, config, shapes)
    return Adapter(config.rank, config.scale, updates, _fingerprint(config_bytes, data))


def _read(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(limit + 1)
    except OSError as error:
        raise BadAdapter(f"{path.name} cannot be read: {error.strerror}") from None
    if len(data) > limit:
        raise BadAdapter(f"{path.name} has more than {limit:,} bytes, the most that an adapter of this model can have")
    return data


def _fingerprint(*parts: bytes) -> str:
    digest = sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def _updates(tensors: Mapping[str, torch.Tensor], config: AdapterConfig, shapes: LinearShapes) -> dict[str, LowRank]:
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise BadAdapter(f"{_WEIGHTS} has a tensor {name[:120]!r}, which is no part of a plain LoRA adapter")
        sides.setdefault(match["layer"], {})[match["side"]] = tensor
    if not sides:
        raise BadAdapter(f"{_WEIGHTS} has no tensors")
    _check_targets(sides, config, shapes)
    return {layer: _update(layer, pair, config, shapes[layer]) for layer, pair in sorted(sides.items())}


def _check_targets(layers: Mapping[str, object], config: AdapterConfig, shapes: LinearShapes) -> None:
    unknown = sorted(layer for layer in layers if layer not in shapes)
    if unknown:
        shown = ", ".join(unknown[:_NAMED])
        raise BadAdapter(f"target_modules: {len(unknown)} are no linear layers of the model's blocks: {shown}")
    if config.targets is None:
        return
    others = sorted(layer for layer in layers if not any(_ends_with(layer, target) for target in config.targets))
    if others:
        raise BadAdapter(f"target_modules does not name {others[0]}, which has a tensor")
    idle = sorted(target for target in config.targets if not any(_ends_with(layer, target) for layer in layers))
    if idle:
        raise BadAdapter(f"target_modules names {idle[0]!r:.80}, which has no tensor")


def _ends_with(layer: str, target: str) -> bool:
    return layer == target or layer.endswith(f".{target}")


def _update(layer: str, pair: Mapping[str, torch.Tensor], config: AdapterConfig, shape: LinearShape) -> LowRank:
    if len(pair) != len("AB"):
        raise BadAdapter(f"{layer} has only lora_{next(iter(pair))}")
    for side, tensor, wanted in (
        ("A", pair["A"], (config.rank, shape.inputs)),
        ("B", pair["B"], (shape.outputs, config.rank)),
    ):
        if tuple(tensor.shape) != wanted:
            raise BadAdapter(f"lora_{side} of {layer} is {_size(tensor.shape)}; the model and r need {_size(wanted)}")
        if tensor.dtype not in _DTYPES:
            raise BadAdapter(f"lora_{side} of {layer} has numbers of type {str(tensor.dtype).removeprefix('torch.')}")
        if not bool(torch.isfinite(tensor).all()):
            raise BadAdapter(f"lora_{side} of {layer} has numbers that are not finite")
    update = LowRank(pair["A"], pair["B"])
    if not bool(torch.isfinite(update.scaled_up(config.scale)).all()):
        raise BadAdapter(f"lora_B of {layer} has numbers that are not finite once they are scaled by lora_alpha")
    return update


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "a single number"
