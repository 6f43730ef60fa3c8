"""Tiny random models of each family, their decoders, and plain ways to run both.

Must not know: the worker, the scheduler.
"""

from collections.abc import Mapping, Sequence
from typing import Any

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

from engine_service.worker.config import WeightFormat
from engine_service.worker.kernels.cpu_model import (
    CpuModel,
    PoolSize,
    build_cpu_model,
)
from engine_service.worker.kernels.decoder_shape import Unsupported
from engine_service.worker.kernels.library import ThreadTeam
from tests.unit.kernels.batches import Request, Requests

SMALL = {"vocab_size": 130, "num_hidden_layers": 3, "max_position_embeddings": 512, "initializer_range": 0.3}
GQA = {"hidden_size": 48, "intermediate_size": 100, "num_attention_heads": 6, "num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: Mapping[str, tuple[type, type, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, GQA),
    "llama-tied-mha": (
        LlamaConfig,
        LlamaForCausalLM,
        {**GQA, "num_key_value_heads": 6, "tie_word_embeddings": True},
    ),
    "llama-bias-odd": (
        LlamaConfig,
        LlamaForCausalLM,
        {**GQA, "hidden_size": 54, "intermediate_size": 51, "head_dim": 10, "attention_bias": True},
    ),
    "llama-linear-rope": (
        LlamaConfig,
        LlamaForCausalLM,
        {**GQA, "rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}},
    ),
    "llama3-rope": (LlamaConfig, LlamaForCausalLM, {**GQA, "rope_parameters": LLAMA3_ROPE}),
    "mistral-window": (MistralConfig, MistralForCausalLM, {**GQA, "sliding_window": 20}),
    "mistral": (MistralConfig, MistralForCausalLM, {**GQA, "sliding_window": None}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, GQA),
    "qwen2-window": (
        Qwen2Config,
        Qwen2ForCausalLM,
        {**GQA, "use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {**GQA, "head_dim": 32}),
}


def make_reference(name: str) -> PreTrainedModel:
    config_type, model_type, options = MODELS[name]
    torch.manual_seed(11)
    model = model_type(config_type(**{**SMALL, **options})).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def build(model: PreTrainedModel, team: ThreadTeam, dtype: torch.dtype = torch.float32) -> CpuModel:
    built = build_cpu_model(model.state_dict(), model.config, PoolSize(80, 16), dtype, 512, team)
    assert isinstance(built, CpuModel)
    return built


def make_prompt(length: int, seed: int) -> list[int]:
    return torch.randint(0, 130, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def finish(model: CpuModel, requests: Requests, running: Sequence[Request], count: int) -> None:
    """Greedy tokens by the decoder's own `best`, `count` for each request, whole prompts first."""
    for _ in range(count):
        chunks = [(request, len(request.tokens) - request.computed) for request in running]
        best = model.step(requests.batch(chunks), want_logits=False).best.tolist()
        for request, token in zip(running, best, strict=True):
            request.tokens.append(token)


@torch.inference_mode()
def greedy(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


DTYPES = [torch.float32, torch.bfloat16]


def all_logits(model: CpuModel, requests: Requests, request: Request, chunk: int) -> torch.Tensor:
    parts = []
    while request.computed < len(request.tokens):
        count = min(chunk, len(request.tokens) - request.computed)
        parts.append(model.step(requests.batch([(request, count)], sample_all=True)).logits.clone())
    return torch.cat(parts)


# Heads of 32, so that padding does not cut the groups of 32 inputs.
WIDE = {"hidden_size": 96, "intermediate_size": 160, "num_attention_heads": 3, "num_key_value_heads": 1}


def build_rounded(
    model: PreTrainedModel, team: ThreadTeam, dtype: torch.dtype, weight_format: WeightFormat
) -> CpuModel | Unsupported:
    weights = model.state_dict()
    pool = PoolSize(80, 16)
    return build_cpu_model(weights, model.config, pool, dtype, 512, team, weight_format)
