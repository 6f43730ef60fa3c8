"""The whole decoder of every variant against transformers in fp32, on tiny random models of each family."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine_service.worker.kernels.cpu_model import (
    CpuModel,
    PoolSize,
    WeightFormat,
    build_cpu_model,
    kv_bytes_per_block,
)
from engine_service.worker.kernels.decoder_shape import Unsupported, decoder_shape
from engine_service.worker.kernels.library import KernelLibrary, ThreadTeam
from tests.unit.kernels.batches import Request, Requests

_SMALL = {"vocab_size": 130, "num_hidden_layers": 3, "max_position_embeddings": 512, "initializer_range": 0.3}
_GQA = {"hidden_size": 48, "intermediate_size": 100, "num_attention_heads": 6, "num_key_value_heads": 2}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_MODELS: Mapping[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, _GQA),
    "llama-tied-mha": (
        LlamaConfig,
        LlamaForCausalLM,
        {**_GQA, "num_key_value_heads": 6, "tie_word_embeddings": True},
    ),
    "llama-bias-odd": (
        LlamaConfig,
        LlamaForCausalLM,
        {**_GQA, "hidden_size": 54, "intermediate_size": 51, "head_dim": 10, "attention_bias": True},
    ),
    "llama-linear-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {**_GQA, "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "llama3-rope": (LlamaConfig, LlamaForCausalLM, {**_GQA, "rope_parameters": _LLAMA3_ROPE}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {**_GQA, "sliding_window": 20}),
    "mistral": (MistralConfig, MistralForCausalLM, {**_GQA, "sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, _GQA),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {**_GQA, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {**_GQA, "head_dim": 32}),
}


def _reference(name: str) -> PreTrainedModel:
    config_type, model_type, options = _MODELS[name]
    torch.manual_seed(11)
    model = model_type(config_type(**{**_SMALL, **options})).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def _build(model: PreTrainedModel, team: ThreadTeam, dtype: torch.dtype = torch.float32) -> CpuModel:
    built = build_cpu_model(model.state_dict(), model.config, PoolSize(80, 16), dtype, 512, team)
    assert isinstance(built, CpuModel)
    return built


def _prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 130, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _finish(model: CpuModel, requests: Requests, running: Sequence[Request], count: int) -> None:
    """Greedy tokens by the decoder's own `best`, `count` for each request, whole prompts first."""
    for _ in range(count):
        chunks = [(request, len(request.tokens) - request.computed) for request in running]
        best = model.step(requests.batch(chunks), want_logits=False).best.tolist()
        for request, token in zip(running, best, strict=True):
            request.tokens.append(token)


@torch.inference_mode()
def _greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


@pytest.mark.parametrize("name", _MODELS)
def test_logits_of_every_token(team: ThreadTeam, name: str) -> None:
    reference = _reference(name)
    model, requests = _build(reference, team), Requests(80)
    prompt = _prompt(150, seed=1)
    got = model.step(requests.batch([(requests.add(prompt), 150)], sample_all=True))
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt])).logits[0]
    assert (got.logits - expected).norm() / expected.norm() < 2e-5
    assert torch.equal(got.best, got.logits.argmax(-1))


@pytest.mark.parametrize("name", _MODELS)
def test_greedy_tokens_of_a_batch(team: ThreadTeam, name: str) -> None:
    reference = _reference(name)
    model, requests = _build(reference, team), Requests(80)
    prompts = [_prompt(length, seed=length) for length in (1, 15, 16, 40)]
    running = [requests.add(prompt) for prompt in prompts]
    _finish(model, requests, running, 12)
    for prompt, request in zip(prompts, running, strict=True):
        assert request.tokens == _greedy(reference, prompt, 12)


_DTYPES = [torch.float32, torch.bfloat16]


def _logits(model: CpuModel, requests: Requests, request: Request, chunk: int) -> torch.Tensor:
    parts = []
    while request.computed < len(request.tokens):
        count = min(chunk, len(request.tokens) - request.computed)
        parts.append(model.step(requests.batch([(request, count)], sample_all=True)).logits.clone())
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3"])
def test_chunks_do_not_change_bits(team: ThreadTeam, name: str, dtype: torch.dtype) -> None:
    """B054: chunked = whole, bit for bit, in bf16 too."""
    model, requests = _build(_reference(name), team, dtype), Requests(80)
    prompt = _prompt(141, seed=2)
    whole = _logits(model, requests, requests.add(prompt), 141)
    for chunk in (1, 9, 64):
        requests = Requests(80)
        assert torch.equal(_logits(model, requests, requests.add(prompt), chunk), whole), chunk


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_neighbours_do_not_change_bits(team: ThreadTeam, dtype: torch.dtype) -> None:
    """Decode logits of one request alone and among 1 to 63 others, some of them prefilling."""
    model = _build(_reference("llama"), team, dtype)
    prompt = _prompt(30, seed=3)

    def last_logits(neighbours: int) -> torch.Tensor:
        requests = Requests(80)
        request = requests.add(prompt, room=0)
        others = [requests.add(_prompt(1 + i % 9, seed=i), room=0) for i in range(neighbours)]
        model.step(requests.batch([(request, 29)]))
        chunks = [(other, len(other.tokens)) for other in others]
        chunks.insert(neighbours // 2, (request, 1))
        row = neighbours // 2
        return model.step(requests.batch(chunks)).logits[row].clone()

    alone = last_logits(0)
    for neighbours in (1, 2, 7, 11, 12, 31, 32, 63):
        assert torch.equal(last_logits(neighbours), alone), neighbours


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_threads_do_not_change_bits(library: KernelLibrary, dtype: torch.dtype) -> None:
    reference, prompt = _reference("qwen2"), _prompt(100, seed=4)
    results = []
    for threads in (1, 2, 3):
        with ThreadTeam(library, threads) as team:
            model, requests = _build(reference, team, dtype), Requests(80)
            results.append(_logits(model, requests, requests.add(prompt), 33))
            model.close()
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_only_rows_that_sample_are_returned(team: ThreadTeam) -> None:
    model, requests = _build(_reference("llama"), team), Requests(80)
    prompts = [_prompt(length, seed=length) for length in (20, 5, 33)]
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
    reference = _reference("llama")
    weights = dict(reference.state_dict())
    weights["lm_head.weight"] = weights["lm_head.weight"][:44].repeat(3, 1)[:130].clone()
    model = build_cpu_model(weights, reference.config, PoolSize(80, 16), torch.float32, 512, team)
    assert isinstance(model, CpuModel)
    requests = Requests(80)
    output = model.step(requests.batch([(requests.add(_prompt(60, seed=5)), 60)], sample_all=True))
    assert torch.equal(output.best, output.logits.argmax(-1))
    assert output.best.max() < 44


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_have_no_best(team: ThreadTeam, value: float) -> None:
    """B150: one request's overflow is seen, and only there."""
    reference = _reference("llama")
    weights = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    weights["model.embed_tokens.weight"][7, 3] = value
    model = build_cpu_model(weights, reference.config, PoolSize(80, 16), torch.float32, 512, team)
    assert isinstance(model, CpuModel)
    requests = Requests(80)
    good, bad = requests.add([1, 2, 3]), requests.add([1, 7, 3])
    best = model.step(requests.batch([(good, 3), (bad, 3)])).best
    assert best[0] >= 0
    assert best[1] == -1


# Heads of 32, so that padding does not cut the groups of 32 inputs.
_WIDE = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1}


def _four_bit(model: PreTrainedModel, team: ThreadTeam, dtype: torch.dtype) -> CpuModel | Unsupported:
    weights = model.state_dict()
    pool = PoolSize(80, 16)
    return build_cpu_model(weights, model.config, pool, dtype, 512, team, WeightFormat.FOUR_BIT)


def test_four_bit_decoder_equals_one_of_the_rounded_weights(team: ThreadTeam) -> None:
    torch.manual_seed(11)
    reference = LlamaForCausalLM(LlamaConfig(**{**_SMALL, **_WIDE})).eval()
    with torch.no_grad():
        for name, weight in reference.named_parameters():
            if "_proj" in name:
                steps = torch.randint(0, 16, weight.shape).float()
                steps.view(-1, 32)[:, 0], steps.view(-1, 32)[:, 1] = 0, 15
                weight.copy_((steps - 8) / 32)
    model, requests = _four_bit(reference, team, torch.bfloat16), Requests(80)
    assert isinstance(model, CpuModel)
    plain = _build(reference, team, torch.bfloat16)
    prompt = _prompt(50, seed=8)
    got = _logits(model, requests, requests.add(prompt), 50)
    expected = _logits(plain, Requests(80), Requests(80).add(prompt), 50)
    assert (got - expected).norm() / expected.norm() < 0.01
    assert model.weight_bytes < plain.weight_bytes
    again = Requests(80)
    assert torch.equal(_logits(model, again, again.add(prompt), 3), got)


def test_what_four_bits_cannot_hold(team: ThreadTeam) -> None:
    reference = _reference("llama")
    for dtype, reason in [(torch.float32, "need bfloat16"), (torch.bfloat16, "multiples of 32, not 48 and 100")]:
        refusal = _four_bit(reference, team, dtype)
        assert isinstance(refusal, Unsupported)
        assert reason in refusal.reason


def test_sizes_are_reported(team: ThreadTeam) -> None:
    reference = _reference("qwen3")
    model = _build(reference, team)
    shape = decoder_shape(reference.config)
    assert not isinstance(shape, Unsupported)
    assert model.kv_bytes == 80 * kv_bytes_per_block(shape, 16, torch.float32)
    assert model.weight_bytes >= sum(p.numel() * 4 for p in reference.model.layers.parameters() if p.dim() == 2)


def test_stage_times_count_only_when_asked(team: ThreadTeam) -> None:
    model, requests = _build(_reference("llama"), team), Requests(80)
    request = requests.add(_prompt(40, seed=6))
    model.step(requests.batch([(request, 10)]))
    assert set(model.take_times(enabled=True).values()) == {0.0}
    model.step(requests.batch([(request, 30)]))
    times = model.take_times(enabled=False)
    assert all(seconds > 0 for seconds in times.values())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mlp_bias": True}, "MLP with bias"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope of type dynamic"),
    ],
)
def test_what_the_decoder_refuses(options: dict[str, Any], reason: str) -> None:
    refusal = decoder_shape(LlamaConfig(**{**_SMALL, **_GQA, **options}))
    assert isinstance(refusal, Unsupported)
    assert reason in refusal.reason


@pytest.mark.parametrize("blocks_and_size", [(0, 16), (4, 8), (4, 24)])
def test_pool_sizes_that_cannot_be(blocks_and_size: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=str(blocks_and_size[blocks_and_size[0] > 0])):
        PoolSize(*blocks_and_size)


def test_wrong_tensors_are_refused(team: ThreadTeam) -> None:
    model, requests = _build(_reference("llama"), team), Requests(80)
    batch = requests.batch([(requests.add([1, 2, 3]), 3)])
    batch_wrong = type(batch)(
        **{name: getattr(batch, name) for name in batch.__slots__ if name != "seq_lens"},
        seq_lens=batch.seq_lens.long(),
    )
    with pytest.raises(ValueError, match=r"seq_lens must be a contiguous torch\.int32"):
        model.step(batch_wrong)


def test_a_missing_weight_is_named(team: ThreadTeam) -> None:
    reference = _reference("llama")
    weights = {n: t for n, t in reference.state_dict().items() if "layers.1.mlp.down_proj" not in n}
    with pytest.raises(KeyError, match=r"layers\.1\.mlp\.down_proj"):
        build_cpu_model(weights, reference.config, PoolSize(4, 16), torch.float32, 64, team)


def test_a_weight_of_another_size_is_refused(team: ThreadTeam) -> None:
    reference = _reference("llama")
    weights = dict(reference.state_dict())
    weights["model.norm.weight"] = torch.ones(47)
    with pytest.raises(ValueError, match="not the expected size"):
        build_cpu_model(weights, reference.config, PoolSize(4, 16), torch.float32, 64, team)
