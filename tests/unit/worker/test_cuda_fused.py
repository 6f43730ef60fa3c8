"""The fused decoder of the cuda backend: which models it takes, what it refuses, and its pieces compiled."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file

from engine_service.core.sampling import SamplingParams
from engine_service.worker.build import build_worker
from engine_service.worker.config import WorkerConfig
from engine_service.worker.cuda.fused_model import FusedDecoder
from engine_service.worker.cuda.pieces import compiled_pieces, plain_pieces
from engine_service.worker.worker import Worker
from tests.fixtures.checkpoints import greedy_of, load_reference, write_hist, write_random_model
from tests.fixtures.plan_driver import Job, PlanDriver

GREEDY = SamplingParams(max_tokens=12, seed=0, temperature=0.0)
PROMPTS = [[7, 8, 9], list(range(3, 60)), [5]]
SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}


def build(folder: Path) -> Worker:
    return build_worker(
        WorkerConfig(
            model_folder=folder, backend="cuda", num_blocks=40, max_model_len=100, max_num_requests=4, threads=1
        )
    )


def model_of(worker: Worker) -> object:
    return worker._runner._model  # type: ignore[attr-defined]


MODELS: dict[str, tuple[Any, Any]] = {
    "llama, biases, scaled rope": (
        tf.LlamaForCausalLM,
        tf.LlamaConfig(
            **SIZES,
            attention_bias=True,
            rope_parameters={
                "rope_type": "llama3", "rope_theta": 10_000.0, "factor": 8.0, "low_freq_factor": 1.0,
                "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
            },
        ),
    ),
    "qwen2, window": (
        tf.Qwen2ForCausalLM,
        tf.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=9, max_window_layers=1),
    ),
    "qwen3, norms of heads": (tf.Qwen3ForCausalLM, tf.Qwen3Config(**SIZES, head_dim=20)),
    "mistral, tied head": (
        tf.MistralForCausalLM,
        tf.MistralConfig(**SIZES, sliding_window=9, tie_word_embeddings=True),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_families_answer_as_transformers(name: str, tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, *MODELS[name])
    worker, reference = build(folder), load_reference(folder)
    assert isinstance(model_of(worker), FusedDecoder)
    answers = PlanDriver(worker).run([Job(prompt, GREEDY) for prompt in PROMPTS])
    assert answers == [greedy_of(reference, prompt, 12) for prompt in PROMPTS]


def test_other_families_run_as_transformers_has_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tf.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=512, eos_token_id=None)
    with caplog.at_level(logging.WARNING):
        worker = build(write_random_model(tmp_path, tf.GPT2LMHeadModel, config))
    assert worker.info.backend == "cuda"
    assert not isinstance(model_of(worker), FusedDecoder)
    assert "models of type gpt2 have no fused decoder: transformers' layers compute" in caplog.text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "1 missing keys: model.layers.1.mlp.up_proj.weight"),
        ({"model.layers.0.mlp.extra.weight": torch.zeros(2)}, "1 unexpected keys: model.layers.0.mlp.extra.weight"),
        ({"lm_head.weight": torch.zeros(511, 64)}, "weights lm_head.weight are 511 x 64, not 512 x 64"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, torch.Tensor | None], said: str
) -> None:
    folder = write_hist(tmp_path, tokenizer=False)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in changes.items():
        weights.pop(name) if tensor is None else weights.update({name: tensor})
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=said):
        build(folder)


def test_pieces_are_the_same_when_a_compiler_has_had_them() -> None:
    """Traced by torch's compiler front end for changing numbers of tokens; what generates code is not run here."""

    def trace(function: Callable[..., Any]) -> Callable[..., Any]:
        return torch.compile(function, dynamic=True, backend="eager")

    plain, compiled = plain_pieces(), compiled_pieces(trace)
    generator = torch.Generator().manual_seed(0)
    for count in (3, 8, 5):
        x, y = (torch.randn(count, 16, generator=generator) for _ in range(2))
        weight = torch.randn(16, generator=generator)
        heads, angle = torch.randn(count, 2, 8, generator=generator), torch.randn(count, 1, 4, generator=generator)
        assert torch.equal(compiled.norm(x, weight, 1e-5), plain.norm(x, weight, 1e-5))
        for got, expected in zip(
            compiled.add_norm(x, y, weight, 1e-5), plain.add_norm(x, y, weight, 1e-5), strict=True
        ):
            assert torch.equal(got, expected)
        assert torch.equal(compiled.rotate(heads, angle, angle), plain.rotate(heads, angle, angle))
        assert torch.equal(compiled.gate(x), plain.gate(x))
