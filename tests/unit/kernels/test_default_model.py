"""The default model in the decoder: exact greedy tokens in fp32, small logit error and invariance in bf16."""

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine_service.worker.config import WeightFormat
from engine_service.worker.kernels.cpu_model import CpuModel, PoolSize, build_cpu_model
from engine_service.worker.kernels.library import ThreadTeam
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.unit.kernels.batches import Requests

# Token ids of "The capital of France is", "def fibonacci(n):" and a few more words, as text would give them.
_PROMPTS = (
    (504, 3575, 282, 4649, 314),
    (1604, 34512, 20045, 24, 94, 731),
    (6403, 2663, 253, 655, 665, 436, 253, 1165, 3833, 617, 5420, 281, 253, 2230, 4137),
)


@pytest.fixture(scope="module")
def reference() -> PreTrainedModel:
    folder = resolve_model_folder(DEFAULT_MODEL)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def _build(reference: PreTrainedModel, dtype: torch.dtype, team: ThreadTeam) -> CpuModel:
    model = build_cpu_model(reference.state_dict(), reference.config, PoolSize(100, 16), dtype, 2048, team)
    assert isinstance(model, CpuModel)
    return model


def test_fp32_greedy_tokens_equal_transformers(reference: PreTrainedModel, best_team: ThreadTeam) -> None:
    model, requests = _build(reference, torch.float32, best_team), Requests(100)
    running = [requests.add(prompt) for prompt in _PROMPTS]
    for _ in range(10):
        chunks = [(request, len(request.tokens) - request.computed) for request in running]
        for request, token in zip(running, model.step(requests.batch(chunks)).best.tolist(), strict=True):
            request.tokens.append(token)
    for prompt, request in zip(_PROMPTS, running, strict=True):
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=10, min_new_tokens=10, do_sample=False)
        assert request.tokens == expected[0].tolist()


def test_bf16_logits_are_near_fp32(reference: PreTrainedModel, best_team: ThreadTeam) -> None:
    """Teacher-forced: relative error under 0.03, and the same top token wherever fp32 leads by 0.5."""
    model = _build(reference, torch.bfloat16, best_team)
    for prompt in _PROMPTS:
        requests = Requests(100)
        got = model.step(requests.batch([(requests.add(prompt), len(prompt))], sample_all=True)).logits
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        assert (got - expected).norm() / expected.norm() < 0.03
        lead = expected.topk(2).values.diff(dim=-1).abs().squeeze(-1)
        sure = lead > 0.5
        assert torch.equal(got.argmax(-1)[sure], expected.argmax(-1)[sure])


def test_bf16_bits_alone_and_in_a_batch(reference: PreTrainedModel, best_team: ThreadTeam) -> None:
    model = _build(reference, torch.bfloat16, best_team)

    def last_logits(neighbours: int) -> torch.Tensor:
        requests = Requests(100)
        request = requests.add(_PROMPTS[2], room=0)
        others = [requests.add(_PROMPTS[i % 2], room=0) for i in range(neighbours)]
        model.step(requests.batch([(request, 6)]))
        chunks = [*((other, len(other.tokens)) for other in others), (request, 9)]
        return model.step(requests.batch(chunks)).logits[-1].clone()

    alone = last_logits(0)
    for neighbours in (1, 8, 33):
        assert torch.equal(last_logits(neighbours), alone), neighbours


@pytest.mark.parametrize(("weight_format", "most"), [(WeightFormat.INT4, 0.05), (WeightFormat.INT8, 0.015)])
def test_logits_in_few_bits_are_near_fp32(
    reference: PreTrainedModel,
    best_team: ThreadTeam,
    capsys: pytest.CaptureFixture[str],
    weight_format: WeightFormat,
    most: float,
) -> None:
    """This checkpoint lies on a 4-bit grid, so int4 loses little of it; the error is printed."""
    pool, dtype = PoolSize(100, 16), torch.bfloat16
    weights, config = reference.state_dict(), reference.config
    model = build_cpu_model(weights, config, pool, dtype, 2048, best_team, weight_format)
    assert isinstance(model, CpuModel)
    errors = []
    for prompt in _PROMPTS:
        requests = Requests(100)
        got = model.step(requests.batch([(requests.add(prompt), len(prompt))], sample_all=True)).logits
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        errors.append(float((got - expected).norm() / expected.norm()))
    with capsys.disabled():
        print(f"\n{weight_format.value} logits, relative error to fp32: {max(errors):.4f}")
    assert max(errors) < most
