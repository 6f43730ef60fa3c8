"""The cuda backend's choices and refusals, on a CPU."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from engine_service.core.sampling import SamplingParams
from engine_service.worker.build import build_worker
from engine_service.worker.config import CudaOptions, Device, WeightFormat, WorkerConfig
from engine_service.worker.cuda import backend
from engine_service.worker.cuda.decode_graphs import DecodeGraphs
from engine_service.worker.worker import Worker
from tests.fixtures.checkpoints import write_hist, write_random_model
from tests.fixtures.plan_driver import Job, PlanDriver
from tests.unit.worker.test_cuda_kernels import Named

GREEDY = SamplingParams(max_tokens=12, seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"), tokenizer=False)


def build(folder: Path, **settings: Any) -> Worker:
    sizes: dict[str, Any] = {"num_blocks": 40, "max_model_len": 100, "max_num_requests": 4}
    return build_worker(WorkerConfig(model_folder=folder, backend="cuda", threads=1, **sizes | settings))


def test_a_device_that_is_not_there_is_an_error_in_words(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="device is cuda, but this torch finds no CUDA device"):
        build(folder, device=Device.CUDA)


def test_lossy_weights_beside_adapters_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="weight_format int4 cannot be served: max_loras is 2, and LoRA adapters"):
        build(folder, weight_format=WeightFormat.INT4, max_loras=2)


def test_lossy_weights_of_transformers_own_layers_are_refused(tmp_path: Path) -> None:
    config = tf.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=512, eos_token_id=None)
    folder = write_random_model(tmp_path, tf.GPT2LMHeadModel, config)
    with pytest.raises(ValueError, match="weight_format int8 cannot be served: models of type gpt2 have no fused"):
        build(folder, weight_format=WeightFormat.INT8)


def test_without_a_kernel_plain_torch_attends_and_says_why(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(backend, "candidates", lambda *_, **__: [Named("quick", refuses="it is Monday")])
    with caplog.at_level(logging.WARNING):
        assert build(folder).info.backend == "torch"
    assert "attention is not by quick: it is Monday" in caplog.text
    worker = build(folder, weight_format=WeightFormat.INT8)
    assert worker.info.backend == "torch"
    assert worker.info.weights is not None
    assert worker.info.weights.kept == "int8"


def test_a_promise_without_graphs_is_refused(folder: Path) -> None:
    options = CudaOptions(graph_requests=3, batch_invariant=True)
    with pytest.raises(ValueError, match=r"batch_invariant needs graphs for all of max_num_requests 4, but .* for 3"):
        build(folder, cuda=options)


@pytest.mark.parametrize(("options", "graphs"), [(CudaOptions(), 3), (CudaOptions(graph_requests=0), None)])
def test_settings_reach_the_graphs(folder: Path, options: CudaOptions, graphs: int | None) -> None:
    found = build(folder, cuda=options)._runner._graphs  # type: ignore[attr-defined]
    assert isinstance(found, DecodeGraphs) is (graphs is not None)
    assert graphs is None or len(found._graphs) == graphs


def test_invariant_decodes_all_have_one_size(folder: Path) -> None:
    worker = build(folder, cuda=CudaOptions(batch_invariant=True))
    assert worker._runner._graphs._sizes == (4,)  # type: ignore[attr-defined]


def test_windows_softcaps_and_unequal_layers_are_attended(tmp_path: Path) -> None:
    """Gemma 2: every second layer has a window, all scores are soft-capped."""
    config = tf.Gemma2Config(
        vocab_size=200, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=8, max_position_embeddings=128, eos_token_id=None,
        query_pre_attn_scalar=8, attn_logit_softcapping=5.0,
    )  # fmt: skip
    folder = write_random_model(tmp_path, tf.Gemma2ForCausalLM, config)
    answers = []
    for name in ("cuda", "torch"):
        worker = build_worker(
            WorkerConfig(model_folder=folder, backend=name, num_blocks=40, max_model_len=100, threads=1)
        )
        assert worker.info.backend == name
        prompts = [[7, 8, 9], list(range(3, 40))]
        answers.append(PlanDriver(worker).run([Job(prompt, GREEDY) for prompt in prompts]))
    assert answers[0] == answers[1]


def test_the_scheduler_has_all_the_blocks_it_was_promised(folder: Path) -> None:
    """The block of padding is one more."""
    worker = build(folder)
    assert worker.info.num_blocks == 40
    assert worker._runner._attention._layers[0].keys.shape[0] == 41  # type: ignore[attr-defined]
