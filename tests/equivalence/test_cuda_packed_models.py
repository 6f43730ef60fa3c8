"""Packed weights through the cuda backend, on a CPU, against transformers with the weights that they mean."""

from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.core.sampling import SamplingParams
from engine_service.worker.build import build_worker
from engine_service.worker.config import CudaOptions, ModelDtype, WeightFormat, WorkerConfig
from engine_service.worker.cuda.packed_matrix import quantise
from engine_service.worker.cuda.packed_source import GROUP_SIZES
from engine_service.worker.kernels.weight_formats import BITS
from engine_service.worker.worker import Worker
from tests.fixtures.checkpoints import greedy_of, load_reference, write_hist
from tests.fixtures.plan_driver import Job, PlanDriver, at_most
from tests.fixtures.quantized import FORMATS, write_quantized

PROMPTS = ([1, 17, 99, 4, 58], [3, 140, 22], [77, 8, 8, 31, 120, 64, 2, 90, 11])
COUNT = 12
FOUR, EIGHT = WeightFormat.INT4, WeightFormat.INT8


def build(folder: Path, weight_format: WeightFormat, **settings: Any) -> Worker:
    sizes: dict[str, Any] = {"num_blocks": 16, "max_model_len": 100, "max_num_requests": 4, "threads": 1}
    config = WorkerConfig(model_folder=folder, backend="cuda", weight_format=weight_format, **sizes | settings)
    return build_worker(config)


def texts(worker: Worker) -> list[list[int]]:
    params = SamplingParams(max_tokens=COUNT, seed=0, temperature=0.0)
    return PlanDriver(worker).run([Job(list(prompt), params) for prompt in PROMPTS], at_most(4))


@pytest.mark.parametrize(("name", "graphs"), [*((name, 512) for name in FORMATS), ("gptq", 0), ("integers", 0)])
def test_codes_of_a_checkpoint_are_kept(tmp_path: Path, name: str, graphs: int) -> None:
    """Every format, act-order with another order for each matrix of a joined one, in float32: the same tokens."""
    bits = FORMATS[name].options.get("bits", 4)
    reference = write_quantized(tmp_path, name)
    worker = build(tmp_path, FOUR if bits == 4 else EIGHT, cuda=CudaOptions(graph_requests=graphs))
    assert texts(worker) == [greedy_of(reference, prompt, COUNT) for prompt in PROMPTS]
    weights = worker.info.weights
    assert weights is not None
    assert weights.error is not None
    assert (weights.kept, weights.error.same_best) == (f"int{bits}", 1.0)
    assert weights.error.relative < 1e-5


@pytest.mark.parametrize("weight_format", [FOUR, EIGHT])
def test_plain_weights_are_rounded_to_nearest(tmp_path: Path, weight_format: WeightFormat) -> None:
    """transformers with the rounded weights; the error told at the start is that of rounding."""
    folder = write_hist(tmp_path, tokenizer=False)
    worker = build(folder, weight_format, dtype=ModelDtype.FLOAT32)
    reference = load_reference(folder)
    bits = BITS[weight_format]
    read = _written_by(reference)
    with torch.no_grad():
        before = reference(read).logits
        for name, weight in reference.named_parameters():
            if "_proj.weight" in name:
                weight.copy_(quantise(weight, bits, GROUP_SIZES[bits]).dequantised())
    assert texts(worker) == [greedy_of(reference, prompt, COUNT) for prompt in PROMPTS]
    weights = worker.info.weights
    assert weights is not None
    assert weights.error is not None
    assert (weights.source, weights.error.reference, weights.error.positions) == ("plain", "float32", 64)
    with torch.inference_mode():
        after = reference(read).logits
    assert weights.error.relative == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-3)
    assert weights.error.same_best == float((after.argmax(-1) == before.argmax(-1)).float().mean())


def _written_by(reference: Any) -> torch.Tensor:
    """Sixteen tokens each: the first one and those after it."""
    vocabulary = reference.config.vocab_size
    firsts = [text * vocabulary // 4 for text in range(4)]
    return torch.tensor([[first, *greedy_of(reference, [first], 15)] for first in firsts])


@pytest.mark.parametrize(
    ("name", "weight_format", "said"),
    [
        ("gptq-8-bits", FOUR, r"weights have 8 bits \(gptq, 8 bits, groups of 32\)"),
        ("awq", EIGHT, r"weights have 4 bits \(awq, 4 bits, groups of 32\)"),
    ],
)
def test_other_bits_are_refused(tmp_path: Path, name: str, weight_format: WeightFormat, said: str) -> None:
    write_quantized(tmp_path, name, dtype="bfloat16")
    with pytest.raises(ValueError, match=f"weight_format {weight_format.value} cannot be served: .*{said}"):
        build(tmp_path, weight_format)


def test_the_error_is_not_measured_where_that_is_not_wanted_or_has_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_quantized(tmp_path, "awq", dtype="bfloat16")
    measured = build(tmp_path, FOUR).info.weights
    assert measured is not None
    assert measured.error is not None
    assert 0.0 < measured.error.relative < 0.05
    unmeasured = build(tmp_path, FOUR, measure_weight_error=False).info.weights
    assert unmeasured is not None
    assert unmeasured.error is None
    monkeypatch.setattr("engine_service.worker.cuda.fused_loader.free_memory", lambda device: 1000)
    without_room = build(tmp_path, FOUR).info.weights
    assert without_room == unmeasured
    assert "the error of the weights is not measured: the reference takes" in caplog.text
