"""PEFT folders: what is read, and that everything else is refused by the name of the field or the tensor."""

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_service.worker.lora.adapter import LinearShape
from engine_service.worker.lora.adapter_config import BadAdapter
from engine_service.worker.lora.adapter_files import read_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": LinearShape(8, 12), "model.layers.0.mlp.down_proj": LinearShape(16, 8)}
RANK = 2
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "r": RANK,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "down_proj"],
    "bias": "none",
    "use_rslora": False,
    "lora_dropout": 0.1,
    "modules_to_save": None,
}


def key(layer: str, side: str) -> str:
    return f"base_model.model.{layer}.lora_{side}.weight"


def tensors() -> dict[str, torch.Tensor]:
    found = {}
    for layer, (inputs, outputs) in SHAPES.items():
        found[key(layer, "A")] = torch.randn(RANK, inputs)
        found[key(layer, "B")] = torch.randn(outputs, RANK)
    return found


def write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> Path:
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def test_a_whole_folder(tmp_path: Path) -> None:
    weights = tensors()
    adapter = read_adapter(write(tmp_path, CONFIG, weights), SHAPES, max_rank=4)
    assert (adapter.rank, adapter.scale, set(adapter.updates)) == (RANK, 3.0, set(SHAPES))
    layer = "model.layers.0.mlp.down_proj"
    assert torch.equal(adapter.updates[layer].down, weights[key(layer, "A")])
    assert torch.equal(adapter.scaled_up(layer), weights[key(layer, "B")] * 3.0)


def test_rank_stabilised_scale(tmp_path: Path) -> None:
    write(tmp_path, {**CONFIG, "use_rslora": True}, tensors())
    assert read_adapter(tmp_path, SHAPES, 4).scale == pytest.approx(6 / math.sqrt(2))


@pytest.mark.parametrize("targets", ["all-linear", r".*\.(q|down)_proj"])
def test_a_pattern_leaves_it_to_the_tensors(tmp_path: Path, targets: str) -> None:
    write(tmp_path, {**CONFIG, "target_modules": targets}, tensors())
    assert set(read_adapter(tmp_path, SHAPES, 4).updates) == set(SHAPES)


def test_the_fingerprint_is_of_the_content(tmp_path: Path) -> None:
    weights = tensors()
    first = read_adapter(write(tmp_path, CONFIG, weights), SHAPES, 4).fingerprint
    assert read_adapter(write(tmp_path, CONFIG, weights), SHAPES, 4).fingerprint == first
    assert read_adapter(write(tmp_path, {**CONFIG, "lora_alpha": 7}, weights), SHAPES, 4).fingerprint != first
    assert read_adapter(write(tmp_path, CONFIG, tensors()), SHAPES, 4).fingerprint != first


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("peft_type", "LOHA", "peft_type"),
        ("peft_type", None, "peft_type"),
        ("task_type", "SEQ_CLS", "task_type"),
        ("r", 0, "r is 0; it has to be 1..4"),
        ("r", 5, "r is 5; it has to be 1..4"),
        ("r", True, "r is true"),
        ("r", "2", "r is"),
        ("lora_alpha", None, "lora_alpha"),
        ("lora_alpha", float("nan"), "lora_alpha"),
        ("lora_alpha", True, "lora_alpha"),
        ("lora_alpha", 10**400, "lora_alpha"),
        ("lora_alpha", 1e300, "lora_alpha"),
        ("bias", "all", "bias"),
        ("use_rslora", "yes", "use_rslora"),
        ("use_dora", True, "use_dora"),
        ("use_qalora", True, "use_qalora"),
        ("lora_bias", True, "lora_bias"),
        ("fan_in_fan_out", True, "fan_in_fan_out"),
        ("modules_to_save", ["lm_head"], "modules_to_save"),
        ("rank_pattern", {"q_proj": 4}, "rank_pattern"),
        ("alpha_pattern", {"q_proj": 4}, "alpha_pattern"),
        ("layer_replication", [[0, 1]], "layer_replication"),
        ("target_parameters", ["w"], "target_parameters"),
        ("trainable_token_indices", [1], "trainable_token_indices"),
        ("alora_invocation_tokens", [1], "alora_invocation_tokens"),
        ("init_lora_weights", "pissa", "init_lora_weights"),
        ("something_of_next_year", 1, "something_of_next_year"),
        ("target_modules", [], "target_modules"),
        ("target_modules", None, "target_modules"),
        ("target_modules", ["q_proj"], "target_modules does not name model.layers.0.mlp.down_proj"),
        ("target_modules", ["q_proj", "down_proj", "up_proj"], "target_modules names 'up_proj'"),
    ],
)
def test_a_field_that_is_not_served_is_named(tmp_path: Path, field: str, value: object, words: str) -> None:
    write(tmp_path, {**CONFIG, field: value}, tensors())
    with pytest.raises(BadAdapter) as refused:
        read_adapter(tmp_path, SHAPES, max_rank=4)
    assert words in str(refused.value)
    assert str(tmp_path) not in str(refused.value)


def _without(name: str) -> dict[str, torch.Tensor]:
    return {other: tensor for other, tensor in tensors().items() if other != name}


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ({}, "no tensors"),
        (_without(key(Q, "B")), f"{Q} has only lora_A"),
        ({**tensors(), key(Q, "A"): torch.zeros(RANK, 9)}, "lora_A of model.layers.0.self_attn.q_proj is 2 x 9"),
        ({**tensors(), key(Q, "B"): torch.zeros(12, 3)}, "the model and r need 12 x 2"),
        ({**tensors(), key(Q, "B"): torch.full((12, RANK), float("inf"))}, "not finite"),
        ({**tensors(), key(Q, "B"): torch.full((12, RANK), 3e38)}, "not finite once they are scaled"),
        ({**tensors(), key(Q, "B"): torch.zeros(12, RANK, dtype=torch.int64)}, "type int64"),
        (
            {**tensors(), key("lm_head", "A"): torch.zeros(RANK, 8), key("lm_head", "B"): torch.zeros(9, RANK)},
            "lm_head",
        ),
        ({**tensors(), "base_model.model.lm_head.weight": torch.zeros(9, 8)}, "lm_head.weight"),
        ({**tensors(), key(Q, "magnitude_vector"): torch.zeros(9)}, "magnitude_vector"),
    ],
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, weights: dict[str, torch.Tensor], words: str) -> None:
    write(tmp_path, CONFIG, weights)
    with pytest.raises(BadAdapter) as refused:
        read_adapter(tmp_path, SHAPES, max_rank=4)
    assert words in str(refused.value)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, tensors())
    weights = load_file(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(weights, tmp_path / "adapter_model.bin")
    with pytest.raises(BadAdapter, match=r"adapter_model\.safetensors cannot be read: No such file"):
        read_adapter(tmp_path, SHAPES, max_rank=4)
    (tmp_path / "adapter_model.safetensors").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(BadAdapter, match="cannot be read"):
        read_adapter(tmp_path, SHAPES, max_rank=4)


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '"LORA"'])
def test_a_configuration_that_is_no_object(tmp_path: Path, text: str) -> None:
    write(tmp_path, CONFIG, tensors())
    (tmp_path / "adapter_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(BadAdapter, match=r"adapter_config\.json is no JSON object"):
        read_adapter(tmp_path, SHAPES, max_rank=4)


def test_numbers_of_a_type_that_torch_does_not_know(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, tensors())
    header = json.dumps({key(Q, "A"): {"dtype": "F8_E8M0", "shape": [2, 8], "data_offsets": [0, 16]}}).encode()
    data = len(header).to_bytes(8, "little") + header + bytes(16)
    (tmp_path / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(BadAdapter, match="F8_E8M0"):
        read_adapter(tmp_path, SHAPES, max_rank=4)


def test_a_file_larger_than_any_adapter_is_not_read(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, tensors())
    with (tmp_path / "adapter_model.safetensors").open("ab") as file:
        file.truncate(2**33)  # sparse
    with pytest.raises(BadAdapter, match="more than"):
        read_adapter(tmp_path, SHAPES, max_rank=4)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadAdapter, match=r"adapter_config\.json cannot be read: No such file"):
        read_adapter(tmp_path / "none", SHAPES, max_rank=4)
