"""The CPU backend's choices: fused decoder, kernels' attention, plain torch; and what it refuses."""

from pathlib import Path

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from engine_service.worker.build import build_worker
from engine_service.worker.config import ModelDtype, WeightFormat, WorkerConfig
from engine_service.worker.worker import Worker
from tests.fixtures.checkpoints import write_hist, write_random_model

NAME = "model.safetensors"


def build(folder: Path, **settings: object) -> Worker:
    return build_worker(WorkerConfig(model_folder=folder, num_blocks=8, threads=1, **settings))  # type: ignore[arg-type]


def change(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    """Rewrites tensors of a checkpoint; None removes one."""
    weights = load_file(folder / NAME)
    for name, tensor in changes.items():
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, folder / NAME, metadata={"format": "pt"})


def test_a_llama_is_fused_and_others_attend_by_the_kernels(tmp_path: Path) -> None:
    assert build(write_hist(tmp_path / "hist")).info.backend == "cpu"
    config = tf.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=512, eos_token_id=None)
    assert build(write_random_model(tmp_path / "gpt2", tf.GPT2LMHeadModel, config)).info.backend == "cpu attention"


def test_float16_is_computed_by_torch(tmp_path: Path) -> None:
    assert build(write_hist(tmp_path), dtype=ModelDtype.FLOAT16).info.backend == "torch"


def test_without_a_compiler_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_hist(tmp_path / "hist")
    monkeypatch.setenv("TOKENWIRE_CACHE", str(tmp_path / "empty"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build(tmp_path / "hist").info.backend == "torch"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, r"1 missing keys: model.layers.1.mlp.up_proj.weight"),
        ({"model.norm.weight": None}, "1 missing keys: model.norm.weight"),
        ({"model.layers.0.mlp.extra.weight": torch.zeros(2)}, "1 unexpected keys: model.layers.0.mlp.extra.weight"),
        ({"lm_head.weight": torch.zeros(511, 64)}, r"head \(511 x 64, layer 0\) do not fit"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], said: str
) -> None:
    """B150."""
    change(write_hist(tmp_path), changes)
    with pytest.raises(ValueError, match=said):
        build(tmp_path)


def test_derived_tensors_are_no_surprise(tmp_path: Path) -> None:
    change(write_hist(tmp_path), {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    build(tmp_path)


def test_block_sizes_the_kernels_cannot_lay_out_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="block_size must be a multiple of 16, not 24"):
        build(write_hist(tmp_path), block_size=24)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"backend": "torch"}, "the torch backend keeps weights as they are"),
        ({"dtype": ModelDtype.FLOAT32}, "weights need bfloat16, not torch.float32"),
    ],
)
@pytest.mark.parametrize("weight_format", [WeightFormat.INT4, WeightFormat.INT8])
def test_few_bits_are_refused_where_they_cannot_be(
    tmp_path: Path, weight_format: WeightFormat, settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=f"weight_format {weight_format.value} cannot be served: .*{said}"):
        build(write_hist(tmp_path), weight_format=weight_format, **settings)


def test_few_bits_report_their_error_and_run(tmp_path: Path) -> None:
    config = tf.LlamaConfig(
        **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
    )
    folder = write_random_model(tmp_path, tf.LlamaForCausalLM, config)
    errors = {}
    for weight_format in (WeightFormat.INT4, WeightFormat.INT8):
        weights = build(folder, dtype=ModelDtype.BFLOAT16, weight_format=weight_format).info.weights
        assert weights is not None
        assert weights.error is not None
        assert (weights.source, weights.kept) == ("plain", weight_format.value)
        assert (weights.error.reference, weights.error.positions) == ("bfloat16", 64)
        assert 0.0 < weights.error.mean < weights.error.largest
        errors[weight_format] = weights.error
    # Random weights lie on no grid: four bits lose much of them, eight a tenth of that.
    four, eight = errors[WeightFormat.INT4], errors[WeightFormat.INT8]
    assert eight.relative * 8 < four.relative < 0.6
    assert eight.divergence < four.divergence < 1.0
    assert 0.3 < four.same_best <= 1.0


def test_what_keeps_the_error_of_weights_from_being_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_hist(tmp_path, dtype="bfloat16")
    settings: dict[str, object] = {"dtype": ModelDtype.BFLOAT16, "weight_format": WeightFormat.INT4}
    unwanted = build(folder, measure_weight_error=False, **settings).info.weights
    assert unwanted is not None
    assert unwanted.error is None
    assert "not measured" not in caplog.text
    monkeypatch.setattr("engine_service.worker.cpu_backend.free_memory", lambda _device: 1000)
    too_large = build(folder, **settings).info.weights
    assert too_large is not None
    assert too_large.error is None
    assert "the error of the weights is not measured: the reference takes" in caplog.text
