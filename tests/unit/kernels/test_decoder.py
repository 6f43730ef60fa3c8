"""The whole decoder of every variant against transformers in fp32, on tiny random models of each family."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_service.worker.config import WeightFormat
from engine_service.worker.kernels.cpu_model import (
    CpuModel,
    PoolSize,
    build_cpu_model,
    kv_bytes_per_block,
)
from engine_service.worker.kernels.decoder_shape import Unsupported, decoder_shape
from engine_service.worker.kernels.library import KernelLibrary, ThreadTeam
from tests.unit.kernels.batches import Requests
from tests.unit.kernels.models import (
    DTYPES,
    MODELS,
    SMALL,
    WIDE,
    all_logits,
    build,
    build_rounded,
    finish,
    greedy,
    make_prompt,
    make_reference,
)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_every_token(team: ThreadTeam, name: str) -> None:
    reference = make_reference(name)
    model, requests = build(reference, team), Requests(80)
    prompt = make_prompt(150, seed=1)
    got = model.step(requests.batch([(requests.add(prompt), 150)], sample_all=True))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (got.logits - expected).norm() / expected.norm() < 2e-5
    assert torch.equal(got.best, got.logits.argmax(-1))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_of_a_batch(team: ThreadTeam, name: str) -> None:
    reference = make_reference(name)
    model, requests = build(reference, team), Requests(80)
    prompts = [make_prompt(length, seed=length) for length in (1, 15, 16, 40)]
    running = [requests.add(prompt) for prompt in prompts]
    finish(model, requests, running, 12)
    for prompt, request in zip(prompts, running, strict=True):
        assert request.tokens == greedy(reference, prompt, 12)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
def test_chunks_do_not_change_bits(team: ThreadTeam, name: str, dtype: torch.dtype) -> None:
    """B054: chunked = whole, bit for bit, in bf16 too."""
    model, requests = build(make_reference(name), team, dtype), Requests(80)
    prompt = make_prompt(141, seed=2)
    whole = all_logits(model, requests, requests.add(prompt), 141)
    for chunk in (1, 9, 64):
        requests = Requests(80)
        assert torch.equal(all_logits(model, requests, requests.add(prompt), chunk), whole), chunk


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_neighbours_do_not_change_bits(team: ThreadTeam, dtype: torch.dtype) -> None:
    """Decode logits of one request alone and among 1 to 63 others, some of them prefilling."""
    model = build(make_reference("llama"), team, dtype)
    prompt = make_prompt(30, seed=3)

    def last_logits(neighbours: int) -> torch.Tensor:
        requests = Requests(80)
        request = requests.add(prompt, room=0)
        others = [requests.add(make_prompt(1 + i % 9, seed=i), room=0) for i in range(neighbours)]
        model.step(requests.batch([(request, 29)]))
        chunks = [(other, len(other.tokens)) for other in others]
        chunks.insert(neighbours // 2, (request, 1))
        row = neighbours // 2
        return model.step(requests.batch(chunks)).logits[row].clone()

    alone = last_logits(0)
    for neighbours in (1, 2, 7, 11, 12, 31, 32, 63):
        assert torch.equal(last_logits(neighbours), alone), neighbours


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_threads_do_not_change_bits(library: KernelLibrary, dtype: torch.dtype) -> None:
    reference, prompt = make_reference("qwen2"), make_prompt(100, seed=4)
    results = []
    for threads in (1, 2, 3):
        with ThreadTeam(library, threads) as team:
            model, requests = build(reference, team, dtype), Requests(80)
            results.append(all_logits(model, requests, requests.add(prompt), 33))
            model.close()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_only_rows_that_sample_are_returned(team: ThreadTeam) -> None:
    model, requests = build(make_reference("llama"), team), Requests(80)
    prompts = [make_prompt(length, seed=length) for length in (20, 5, 33)]
    every = [requests.add(prompt) for prompt in prompts]
    whole = model.step(requests.batch([(r, len(r.tokens)) for r in every], sample_all=True)).logits.clone()
    requests = Requests(80)
    some = [requests.add(prompt) for prompt in prompts]
    output = model.step(requests.batch([(some[0], 10), (some[1], 5), (some[2], 33)]))
    assert torch.equal(output.logits, whole[[24, 57]])
    nothing = model.step(requests.batch([(some[0], 5)]))
    assert (nothing.logits.shape, nothing.best.shape) == ((0, 130), (0,))
    last = model.step(requests.batch([(some[0], 5)]))
    assert torch.equal(last.logits, whole[[19]])


def test_ties_go_to_the_lowest_index(team: ThreadTeam) -> None:
    """Every third row of the head is the same, so the largest logit is always shared."""
    reference = make_reference("llama")
    weights = dict(reference.state_dict())
    weights["lm_head.weight"] = weights["lm_head.weight"][:44].repeat(3, 1)[:130].clone()
    model = build_cpu_model(weights, reference.config, PoolSize(80, 16), torch.float32, 512, team)
    assert isinstance(model, CpuModel)
    requests = Requests(80)
    output = model.step(requests.batch([(requests.add(make_prompt(60, seed=5)), 60)], sample_all=True))
    assert torch.equal(output.best, output.logits.argmax(-1))
    assert output.best.max() < 44


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_have_no_best(team: ThreadTeam, value: float) -> None:
    """B150: one request's overflow is seen, and only there."""
    reference = make_reference("llama")
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    weights["model.embed_tokens.weight"][7, 3] = value
    model = build_cpu_model(weights, reference.config, PoolSize(80, 16), torch.float32, 512, team)
    assert isinstance(model, CpuModel)
    requests = Requests(80)
    good, bad = requests.add([1, 2, 3]), requests.add([1, 7, 3])
    best = model.step(requests.batch([(good, 3), (bad, 3)])).best
    assert best[0] >= 0
    assert best[1] == -1


@pytest.mark.parametrize(("weight_format", "last"), [(WeightFormat.INT4, 15), (WeightFormat.INT8, 255)])
def test_decoder_in_few_bits_equals_one_of_the_rounded_weights(
    team: ThreadTeam, weight_format: WeightFormat, last: int
) -> None:
    """The head is on the grid, too: eight bits keep it, and four leave it as it is."""
    torch.manual_seed(11)
    reference = LlamaForCausalLM(LlamaConfig(**{**SMALL, **WIDE})).eval()
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if "_proj" in name or "lm_head" in name:
                steps = torch.randint(0, last + 1, weight.shape).float()
                steps.view(-1, 32)[:, 0], steps.view(-1, 32)[:, 1] = 0, last
                weight.copy_((steps - (last + 1) / 2) / (2 * last + 2))
    model, requests = build_rounded(reference, team, torch.bfloat16, weight_format), Requests(80)
    assert isinstance(model, CpuModel)
    plain = build(reference, team, torch.bfloat16)
    prompt = make_prompt(50, seed=8)
    got = all_logits(model, requests, requests.add(prompt), 50)
    expected = all_logits(plain, Requests(80), Requests(80).add(prompt), 50)
    assert (got - expected).norm() / expected.norm() < 0.01
    assert model.weight_bytes < plain.weight_bytes
    again = Requests(80)
    assert torch.equal(all_logits(model, again, again.add(prompt), 3), got)


def test_sizes_are_reported(team: ThreadTeam) -> None:
    reference = make_reference("qwen3")
    model = build(reference, team)
    shape = decoder_shape(reference.config)
    assert not isinstance(shape, Unsupported)
    assert model.kv_bytes == 80 * kv_bytes_per_block(shape, 16, torch.float32)
    assert model.weight_bytes >= sum(p.numel() * 4 for p in reference.model.layers.parameters() if p.dim() == 2)


def test_stage_times_count_only_when_asked(team: ThreadTeam) -> None:
    model, requests = build(make_reference("llama"), team), Requests(80)
    request = requests.add(make_prompt(40, seed=6))
    model.step(requests.batch([(request, 10)]))
    assert set(model.take_times(enabled=True).values()) == {0.0}
    model.step(requests.batch([(request, 30)]))
    times = model.take_times(enabled=False)
    assert all(seconds > 0 for seconds in times.values())


def test_a_closed_model_says_so(best_team: ThreadTeam) -> None:
    """Its memory is gone: whatever is asked of it afterwards must not reach it."""
    model = build(make_reference("llama"), best_team)
    model.close()
    model.close()
    for ask in (lambda: model.weight_bytes, lambda: model.kv_bytes, lambda: model.take_times(enabled=True)):
        with pytest.raises(RuntimeError, match="closed"):
            ask()
