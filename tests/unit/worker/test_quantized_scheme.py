"""What a quantization_config says, and which ones are refused, by field."""

import json
from pathlib import Path
from typing import Any

import pytest

from engine_service.worker.checkpoint import UnsupportedModelError
from engine_service.worker.quantized.scheme import Layout, Scheme, read_scheme
from tests.fixtures.quantized import awq_config, compressed_config, gptq_config


def _read(folder: Path, given: Any) -> Scheme | None:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": given}))
    return read_scheme(folder)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (None, None),
        (gptq_config(128), Scheme(Layout.GPTQ, 4, 128, zero_offset=1)),
        (gptq_config(-1, 8, checkpoint_format="gptq_v2"), Scheme(Layout.GPTQ, 8, None)),
        (awq_config(64), Scheme(Layout.AWQ, 4, 64)),
        (compressed_config(symmetric=True), Scheme(Layout.PACKED, 4, 32, is_symmetric=True)),
        (compressed_config("int-quantized", 8, None), Scheme(Layout.INTEGERS, 8, None)),
    ],
)
def test_read(tmp_path: Path, given: Any, wanted: Scheme | None) -> None:
    assert _read(tmp_path, given) == wanted


def _group(**changes: Any) -> dict[str, Any]:
    config = compressed_config()
    group = config["config_groups"]["group_0"]
    weights = {**group["weights"], **changes.pop("weights", {})}
    return {**config, "config_groups": {"group_0": {**group, "weights": weights, **changes}}}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes', .* has to be gptq or awq or compressed-"),
        ({"quant_method": ["gptq"]}, "quant_method is"),
        ({}, "quant_method is None"),
        ([], "quantization_config has to be an object"),
        (gptq_config(bits=3), "bits is 3, .* 4 or 8"),
        (gptq_config(bits=True), "bits is True"),
        (gptq_config(0), "group_size is 0"),
        (gptq_config(None), "group_size is None"),  # type: ignore[arg-type]
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format is 'marlin', .* gptq or gptq_v2"),
        (gptq_config(dynamic={"-:mlp": {}}), "dynamic is 'set'"),
        (awq_config(version="gemv"), "version is 'gemv'"),
        (awq_config(zero_point=False), "zero_point is False"),
        (awq_config(bits=8), "bits is 8"),
        (compressed_config("float-quantized"), "format is 'float-quantized'"),
        (compressed_config(config_groups={}), "config_groups is 0, .* one group"),
        (compressed_config(kv_cache_scheme={"num_bits": 8}), "kv_cache_scheme is 'set'"),
        (_group(input_activations={"num_bits": 8}), "config_groups.group_0.input_activations is 'set'"),
        (_group(weights={"type": "float"}), "config_groups.group_0.weights.type is 'float'"),
        (_group(weights={"num_bits": 2}), "config_groups.group_0.weights.num_bits is 2"),
        (_group(weights={"strategy": "block"}), "config_groups.group_0.weights.strategy is 'block'"),
        ({**compressed_config(), "config_groups": {"a": 1}}, "a.weights is None"),
    ],
)
def test_refused_by_field(tmp_path: Path, given: Any, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        _read(tmp_path, given)
