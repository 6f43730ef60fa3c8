"""What is loaded and what is refused, with the reason in words (B150)."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from engine_service.worker.build import build_worker
from engine_service.worker.config import Device, ModelDtype, WorkerConfig
from engine_service.worker.model_loader import load_model
from tests.fixtures.checkpoints import write_hist, write_random_model

CPU = torch.device("cpu")


def change_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    change(weights)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.fixture
def hist(tmp_path: Path) -> Path:
    return write_hist(tmp_path, tokenizer=False)


def test_facts_of_a_checkpoint(hist: Path) -> None:
    loaded = load_model(hist, ModelDtype.AUTO, CPU)
    assert (loaded.facts.vocab_size, loaded.facts.max_model_len, loaded.facts.eos_token_ids) == (512, 4096, (0,))
    assert (loaded.facts.architecture, loaded.facts.dtype) == ("LlamaForCausalLM", torch.float32)
    assert [(shape.num_query_heads, shape.num_kv_heads, shape.key_dim) for shape in loaded.paged.layers] == [
        (4, 2, 16)
    ] * 2


@pytest.mark.parametrize(
    ("own", "asked", "served"),
    [
        ("bfloat16", ModelDtype.AUTO, torch.bfloat16),
        ("float16", ModelDtype.AUTO, torch.float16),
        ("float32", ModelDtype.AUTO, torch.float32),
        ("bfloat16", ModelDtype.FLOAT32, torch.float32),
        ("float32", ModelDtype.BFLOAT16, torch.bfloat16),
    ],
)
def test_dtype_is_the_checkpoints_unless_set(
    tmp_path: Path, own: str, asked: ModelDtype, served: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """B150: auto is the checkpoint's; an override is logged."""
    model = tf.AutoModelForCausalLM.from_pretrained(write_hist(tmp_path / "float32", tokenizer=False))
    model.to(getattr(torch, own)).save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING, logger="engine_service"):
        assert load_model(tmp_path, asked, CPU).facts.dtype == served
    messages = [record.getMessage() for record in caplog.records]
    assert messages == (
        [] if asked is ModelDtype.AUTO else [f"checkpoint is torch.{own}, served as {served} because dtype was set"]
    )


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 7]}, 2, (5, 7)),
        ({"eos_token_id": 5}, 2, (5,)),
        ({}, 2, (2,)),
        (None, 2, (2,)),
        (None, [2, 3], (2, 3)),
        (None, None, ()),
        ({"eos_token_id": 0}, 2, (0,)),
    ],
)
def test_end_of_text_ids(hist: Path, generation: dict[str, Any] | None, config: Any, expected: tuple[int, ...]) -> None:
    path = hist / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps(generation))
    change_json(hist / "config.json", eos_token_id=config)
    assert load_model(hist, ModelDtype.AUTO, CPU).facts.eos_token_ids == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "1 missing keys: model.norm.weight"),
        (lambda weights: weights.update(extra=torch.zeros(1)), "1 unexpected keys: extra"),
        (
            lambda weights: weights.update({"model.norm.weight": torch.ones(63)}),
            r"1 mismatched keys: .*model\.norm\.weight",
        ),
        (
            lambda weights: [weights.pop(name) for name in list(weights) if "layers.1" in name],
            r"9 missing keys: .*, \.\.\.",
        ),
    ],
)
def test_weights_that_do_not_fit(hist: Path, change: Callable[[Any], object], message: str) -> None:
    """B150."""
    change_weights(hist, change)
    with pytest.raises(ValueError, match=message):
        load_model(hist, ModelDtype.AUTO, CPU)


def test_a_cut_off_weight_file(hist: Path) -> None:
    path = hist / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="weights cannot be read"):
        load_model(hist, ModelDtype.AUTO, CPU)


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    write_hist(tmp_path, tokenizer=False, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert load_model(tmp_path, ModelDtype.AUTO, CPU).facts.vocab_size == 512


def test_only_safetensors(hist: Path) -> None:
    weights = load_file(hist / "model.safetensors")
    (hist / "model.safetensors").unlink()
    torch.save(weights, hist / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"no \.safetensors file"):
        load_model(hist, ModelDtype.AUTO, CPU)


@pytest.mark.parametrize("text", [None, "{}", "[", '{"model_type": "no-such-model"}'])
def test_a_folder_that_is_no_checkpoint(hist: Path, text: str | None) -> None:
    (hist / "config.json").unlink()
    if text is not None:
        (hist / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(hist, ModelDtype.AUTO, CPU)


def test_code_of_a_checkpoint_is_never_run(hist: Path) -> None:
    (hist / "evil.py").write_text("raise SystemExit('executed')")
    change_json(
        hist / "config.json",
        model_type="evil",
        auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
    )
    with pytest.raises(ValueError, match=r"config\.json is not understood"):
        load_model(hist, ModelDtype.AUTO, CPU)


TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
REFUSED: dict[str, tuple[Any, Callable[[], Any], str]] = {
    "mamba": (
        tf.MambaForCausalLM,
        lambda: tf.MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4),
        "layers of type linear_attention are not supported",
    ),
    "recurrent_hybrid": (
        tf.Qwen3NextForCausalLM,
        lambda: tf.Qwen3NextConfig(
            **TINY, layer_types=["linear_attention", "full_attention"], num_experts=0, head_dim=8
        ),
        "layers of type linear_attention are not supported",
    ),
    "encoder_decoder": (
        tf.T5ForConditionalGeneration,
        lambda: tf.T5Config(vocab_size=64, d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16),
        "encoder-decoder",
    ),
    "attention_sinks": (
        tf.GptOssForCausalLM,
        lambda: tf.GptOssConfig(**TINY, head_dim=8, num_local_experts=2, num_experts_per_tok=1),
        "s_aux",
    ),
    "own_attention": (
        tf.BloomForCausalLM,
        lambda: tf.BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=2),
        "cannot load this model|use plain attention",
    ),
    "rope_that_depends_on_the_batch": (
        tf.LlamaForCausalLM,
        lambda: tf.LlamaConfig(**TINY, rope_parameters=LONGROPE),
        "set max_model_len to at most 64",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_be_served_are_refused(name: str, tmp_path: Path) -> None:
    model_class, config, message = REFUSED[name]
    write_random_model(tmp_path, model_class, config())
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, ModelDtype.AUTO, CPU)


def test_a_length_dependent_rope_is_served_below_its_original_length(tmp_path: Path) -> None:
    write_random_model(tmp_path, tf.LlamaForCausalLM, tf.LlamaConfig(**TINY, rope_parameters=LONGROPE))
    worker = build_worker(WorkerConfig(model_folder=tmp_path, num_blocks=8, max_model_len=64, threads=1))
    assert worker.info.max_model_len == 64


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_device_is_refused(hist: Path) -> None:
    with pytest.raises(ValueError, match="finds no CUDA device"):
        build_worker(WorkerConfig(model_folder=hist, device=Device.CUDA))
