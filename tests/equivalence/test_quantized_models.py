"""Quantized checkpoints through the backends against transformers with the weights that they mean."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from engine_service.core.sampling import SamplingParams
from engine_service.core.weight_report import LogitError, WeightReport
from engine_service.worker.build import build_worker
from engine_service.worker.checkpoint import UnsupportedModelError
from engine_service.worker.config import ModelDtype, WeightFormat, WorkerConfig
from engine_service.worker.kernels.build import default_folder, prepare_best_library
from engine_service.worker.kernels.cpu_model import CpuModel, PoolSize, build_cpu_model
from engine_service.worker.kernels.library import KernelLibrary, ThreadTeam
from engine_service.worker.quantized.checkpoint import open_checkpoint
from engine_service.worker.weight_error import POOL, measure_error
from engine_service.worker.worker import Worker
from tests.fixtures.checkpoints import greedy_of
from tests.fixtures.plan_driver import Job, PlanDriver, at_most
from tests.fixtures.quantized import FORMATS, write_quantized
from tests.unit.kernels.batches import Requests

PROMPTS = ([1, 17, 99, 4, 58], [3, 140, 22], [77, 8, 8, 31, 120, 64, 2, 90, 11])
COUNT = 12


@pytest.fixture(scope="module")
def team() -> ThreadTeam:
    library = prepare_best_library(default_folder(), print)
    assert isinstance(library, Path)
    return ThreadTeam(KernelLibrary(library), 1)


def _worker(folder: Path, **settings: Any) -> Worker:
    return build_worker(WorkerConfig(model_folder=folder, num_blocks=16, threads=1, **settings))


def _texts(worker: Worker, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    params = SamplingParams(max_tokens=COUNT, seed=0, temperature=0.0)
    return PlanDriver(worker).run([Job(list(prompt), params) for prompt in prompts], at_most(4))


@pytest.mark.parametrize("name", FORMATS)
def test_logits_and_texts_are_those_of_the_dequantised_model(tmp_path: Path, name: str, team: ThreadTeam) -> None:
    """float32 throughout: sums of some hundred products in another order, hence 2e-4 of the largest logit."""
    reference = write_quantized(tmp_path, name)
    weights, config = open_checkpoint(tmp_path, torch.float32), AutoConfig.from_pretrained(tmp_path)
    built = build_cpu_model(weights, config, PoolSize(8, 16), torch.float32, 64, team)
    assert isinstance(built, CpuModel)
    requests = Requests(8)
    request = requests.add(tuple(PROMPTS[2]))
    got = built.step(requests.batch([(request, len(PROMPTS[2]))], sample_all=True)).logits
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPTS[2]])).logits[0]
    assert (got - expected).abs().max() < 2e-4 * expected.abs().max()
    assert _texts(_worker(tmp_path)) == [greedy_of(reference, prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("backend", ["torch", "cuda"])
@pytest.mark.parametrize("name", ["gptq-act-order", "awq", "integers"])
def test_texts_of_other_backends(tmp_path: Path, name: str, backend: str) -> None:
    reference = write_quantized(tmp_path, name)
    assert _texts(_worker(tmp_path, backend=backend)) == [greedy_of(reference, prompt, COUNT) for prompt in PROMPTS]


def test_a_model_differs_in_nothing_from_itself(tmp_path: Path, team: ThreadTeam) -> None:
    """Also with other blocks; and a scaled copy differs by what it is scaled by."""
    model = write_quantized(tmp_path, "awq")
    weights = model.state_dict()
    reference = build_cpu_model(weights, model.config, POOL, torch.float32, 64, team)
    same = build_cpu_model(weights, model.config, PoolSize(8, 32), torch.float32, 64, team)
    larger = {**weights, "lm_head.weight": weights["lm_head.weight"] * 1.25}
    scaled = build_cpu_model(larger, model.config, PoolSize(8, 32), torch.float32, 64, team)
    assert isinstance(reference, CpuModel)
    assert isinstance(same, CpuModel)
    assert isinstance(scaled, CpuModel)
    assert measure_error(reference, same, 1, 32) == LogitError("float32", 64, 0.0, 0.0, 0.0, 0.0, 1.0)
    error = measure_error(reference, scaled, 1, 32)
    assert error.relative == pytest.approx(0.25, rel=1e-4)
    assert error.same_best == 1.0
    assert error.divergence > 0.0


def test_the_error_of_rounding_to_bfloat16_is_told(tmp_path: Path) -> None:
    write_quantized(tmp_path, "gptq")
    weights = _worker(tmp_path, dtype=ModelDtype.BFLOAT16).info.weights
    assert weights is not None
    assert weights.error is not None
    assert (weights.source, weights.kept) == ("gptq, 4 bits, groups of 32", "bfloat16")
    assert 0.0 < weights.error.relative < 0.05
    exact = _worker(tmp_path).info.weights
    assert exact == WeightReport("gptq, 4 bits, groups of 32", "float32", None)


def test_half_precision_checkpoints_are_served_in_bfloat16_when_asked(tmp_path: Path) -> None:
    write_quantized(tmp_path, "gptq", dtype="float16")
    info = _worker(tmp_path, dtype=ModelDtype.BFLOAT16).info
    assert (info.backend, info.dtype) == ("cpu", "bfloat16")


def _change(folder: Path, **tensors: torch.Tensor | None) -> None:
    weights = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name, None)
        if tensor is not None:
            weights[name] = tensor
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


LAYER = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize(
    ("part", "tensor", "said"),
    [
        ("scales", torch.zeros(3, 128), f"weights of {LAYER} do not fit: scales has to be 2 x 128, not 3 x 128"),
        ("qzeros", None, f"weights of {LAYER} do not fit: qzeros is missing"),
        ("qweight", None, "weight"),
        ("extra", torch.zeros(2), f"1 unexpected keys: {LAYER}.extra"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, backend: str, part: str, tensor: torch.Tensor | None, said: str) -> None:
    write_quantized(tmp_path, "gptq")
    _change(tmp_path, **{f"{LAYER}.{part}": tensor})
    with pytest.raises(ValueError, match=said):
        _worker(tmp_path, backend=backend)


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_what_is_not_known_is_refused_by_field(tmp_path: Path, backend: str) -> None:
    write_quantized(tmp_path, "gptq")
    content = json.loads((tmp_path / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedModelError, match=r"quantization_config.quant_method is 'bitsandbytes'"):
        _worker(tmp_path, backend=backend)


def test_a_configuration_without_its_tensors_is_refused(tmp_path: Path) -> None:
    reference = write_quantized(tmp_path, "gptq")
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"quantized \(gptq, 4 bits, groups of 32\), but no qweight is there"):
        _worker(tmp_path)


INT4, INT8 = WeightFormat.INT4, WeightFormat.INT8
FOUR_BITS = ("gptq", "gptq-symmetric-64", "gptq-v2", "awq", "awq-row", "packed", "packed-symmetric")
EIGHT_BITS = ("gptq-8-bits", "packed-8-bits-row", "integers", "integers-symmetric", "integers-96")
KEPT = [*((name, INT4) for name in FOUR_BITS), *((name, INT8) for name in EIGHT_BITS)]


def _packed(folder: Path, team: ThreadTeam, weight_format: WeightFormat) -> CpuModel:
    weights, config = open_checkpoint(folder, torch.bfloat16), AutoConfig.from_pretrained(folder)
    model = build_cpu_model(weights, config, PoolSize(8, 16), torch.bfloat16, 64, team, weight_format)
    assert isinstance(model, CpuModel)
    return model


def _logits(model: CpuModel) -> torch.Tensor:
    requests = Requests(8)
    return model.step(requests.batch([(requests.add(PROMPTS[2]), len(PROMPTS[2]))], sample_all=True)).logits


@pytest.mark.parametrize(("name", "weight_format"), KEPT)
def test_the_codes_of_a_checkpoint_are_kept(
    tmp_path: Path, name: str, weight_format: WeightFormat, team: ThreadTeam
) -> None:
    """Weights are the file's own, so all that differs from float32 is the rounding of activations to bf16: no more than
    with the weights in bf16 (some models of eight random bits suffer more from it). Quantizing once more would be many
    times that in four bits."""
    reference = write_quantized(tmp_path, name, dtype="bfloat16")
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPTS[2]])).logits[0]
    errors = []
    for kept in (weight_format, WeightFormat.PLAIN):
        got = _logits(_packed(tmp_path, team, kept))
        errors.append(float((got - expected).norm() / expected.norm()))
    assert errors[0] < (0.02 if weight_format is INT4 else 0.06)
    assert errors[0] < 1.3 * errors[1]


def test_the_codes_of_a_head_are_kept(tmp_path: Path, team: ThreadTeam) -> None:
    """Of one scale a row, which the format itself would not choose: the same numbers as with the head in float32, but
    for the rounding of its inputs to bf16."""
    reference = write_quantized(tmp_path, "integers", dtype="bfloat16", head=True)
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPTS[2]])).logits[0]
    packed, plain = (_packed(tmp_path, team, kept) for kept in (INT8, WeightFormat.PLAIN))
    errors = [float((_logits(model) - expected).norm() / expected.norm()) for model in (packed, plain)]
    assert errors[0] < 1.3 * errors[1]
    head = 160 * 64
    layers = plain.weight_bytes // 2 - head
    # Scale and middle of 8 bytes: one for each output.
    assert packed.weight_bytes == layers + head + 8 * (160 + _outputs(reference))


def _outputs(model: torch.nn.Module) -> int:
    return sum(len(weight) for name, weight in model.named_parameters() if "_proj" in name)


def test_a_packed_checkpoint_takes_the_memory_of_its_bits(tmp_path: Path, team: ThreadTeam) -> None:
    """4 bits a weight, and 32 more for scale and zero of each 32: 5 bits for 16. In eight bits 64 more for each 32, and
    the head, which the file leaves plain, takes 9."""
    head = 160 * 64
    for name, weight_format, of_layers, of_head in (("awq", INT4, 5, 16), ("gptq-8-bits", INT8, 10, 9)):
        write_quantized(tmp_path / name, name, dtype="bfloat16")
        plain = _packed(tmp_path / name, team, WeightFormat.PLAIN).weight_bytes
        packed = _packed(tmp_path / name, team, weight_format).weight_bytes
        assert packed * 8 == (plain // 2 - head) * of_layers + head * of_head


@pytest.mark.parametrize(
    ("name", "weight_format", "source"),
    [
        ("gptq", INT4, "gptq, 4 bits, groups of 32"),
        ("gptq-8-bits", INT8, "gptq, 8 bits, groups of 32"),
        ("integers", INT8, "int-quantized, 8 bits, one scale a row"),
    ],
)
def test_few_bits_through_the_worker(tmp_path: Path, name: str, weight_format: WeightFormat, source: str) -> None:
    write_quantized(tmp_path, name, dtype="float16")
    worker = _worker(tmp_path, dtype=ModelDtype.BFLOAT16, weight_format=weight_format)
    weights = worker.info.weights
    assert weights is not None
    assert weights.error is not None
    assert (weights.source, weights.kept) == (source, weight_format.value)
    assert weights.error.reference == "float32"
    assert 0.0 < weights.error.relative < 0.05
    texts = _texts(worker)
    assert [len(text) for text in texts] == [COUNT] * 3
    assert texts == [_texts(worker, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("name", "weight_format", "said"),
    [
        ("gptq-act-order", INT4, r"the groups of model.layers.0.self_attn.q_proj.weight are no neighbouring inputs"),
        ("gptq-8-bits-act-order", INT8, r"the groups of model.layers.0.self_attn.q_proj.weight are no neighbour"),
        ("gptq-8-bits", INT4, r"weights have 8 bits \(gptq, 8 bits, groups of 32\)"),
        ("gptq", INT8, r"weights have 4 bits \(gptq, 4 bits, groups of 32\)"),
        ("awq-16", INT4, "group_size 16 is no multiple of 32"),
        ("integers-16", INT8, "group_size 16 is no multiple of 32"),
    ],
)
def test_codes_that_cannot_be_kept_are_refused(
    tmp_path: Path, name: str, weight_format: WeightFormat, said: str
) -> None:
    write_quantized(tmp_path, name, dtype="bfloat16")
    with pytest.raises(ValueError, match=f"weight_format {weight_format.value} cannot be served: .*{said}"):
        _worker(tmp_path, weight_format=weight_format)


def test_a_layer_that_is_not_quantized_is_refused_for_int4_only(tmp_path: Path) -> None:
    reference = write_quantized(tmp_path, "gptq")
    _change(tmp_path, **{f"{LAYER}.{part}": None for part in ("qweight", "qzeros", "scales", "g_idx")})
    _change(tmp_path, **{f"{LAYER}.weight": reference.state_dict()[f"{LAYER}.weight"].clone()})
    assert _texts(_worker(tmp_path)) == [greedy_of(reference, prompt, COUNT) for prompt in PROMPTS]
    with pytest.raises(ValueError, match=f"int4 cannot be served: {LAYER}.weight is not quantized in the checkpoint"):
        _worker(tmp_path, dtype=ModelDtype.BFLOAT16, weight_format=WeightFormat.INT4)
