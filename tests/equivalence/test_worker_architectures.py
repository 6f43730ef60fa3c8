"""Several model families, tiny and random, through the worker against transformers' own greedy generate."""

import random
from pathlib import Path
from typing import Any

import pytest
import transformers as tf

from engine_service.core.sampling import SamplingParams
from engine_service.worker.build import build_worker
from engine_service.worker.config import WorkerConfig
from tests.fixtures.checkpoints import greedy_of, load_reference, write_random_model
from tests.fixtures.plan_driver import Job, PlanDriver, at_most

SMALL: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SLIDING = {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 11}

MODELS: dict[str, tuple[Any, Any]] = {
    "llama": (tf.LlamaForCausalLM, tf.LlamaConfig(**SMALL)),
    "llama_tied": (tf.LlamaForCausalLM, tf.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama_rope_llama3": (tf.LlamaForCausalLM, tf.LlamaConfig(**SMALL, rope_parameters=LLAMA3)),
    "llama_rope_yarn": (tf.LlamaForCausalLM, tf.LlamaConfig(**SMALL, rope_parameters=YARN)),
    "qwen2_bias": (tf.Qwen2ForCausalLM, tf.Qwen2Config(**SMALL)),
    "qwen2_mixed_windows": (
        tf.Qwen2ForCausalLM,
        tf.Qwen2Config(**SMALL, **SLIDING, use_sliding_window=True),
    ),
    "qwen3_qk_norm": (tf.Qwen3ForCausalLM, tf.Qwen3Config(**SMALL, head_dim=16)),
    "mistral_window": (tf.MistralForCausalLM, tf.MistralConfig(**SMALL, sliding_window=9)),
    "phi3": (tf.Phi3ForCausalLM, tf.Phi3Config(**SMALL)),
    "gemma2_softcap": (
        tf.Gemma2ForCausalLM,
        tf.Gemma2Config(**SMALL, **GEMMA, **SLIDING, attn_logit_softcapping=0.5),
    ),
    "gemma3_text": (tf.Gemma3ForCausalLM, tf.Gemma3TextConfig(**SMALL, **GEMMA, **SLIDING)),
    "gpt2_learned_positions": (
        tf.GPT2LMHeadModel,
        tf.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=512, eos_token_id=None),
    ),
    "mixtral_experts": (
        tf.MixtralForCausalLM,
        tf.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2),
    ),
    "olmo2": (tf.Olmo2ForCausalLM, tf.Olmo2Config(**SMALL)),
    "granite_scales": (
        tf.GraniteForCausalLM,
        tf.GraniteConfig(**SMALL, attention_multiplier=0.3, logits_scaling=2.0),
    ),
    "deepseek_v3_mla": (
        tf.DeepseekV3ForCausalLM,
        tf.DeepseekV3Config(
            **{**SMALL, "num_key_value_heads": 4},
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
            moe_intermediate_size=16,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
        ),
    ),
}
COUNT = 16
LENGTHS = (3, 40, 17, 9)


@pytest.mark.parametrize(("backend", "block_size"), [("torch", 4), ("cpu", 16)])
@pytest.mark.parametrize("name", MODELS)
def test_greedy_equals_transformers(name: str, backend: str, block_size: int, tmp_path: Path) -> None:
    """Mixed chunks and decodes; prompts longer and shorter than the window and than a block."""
    folder = write_random_model(tmp_path, *MODELS[name])
    draw = random.Random(name)
    prompts = [draw.choices(range(300), k=length) for length in LENGTHS]
    worker = build_worker(
        WorkerConfig(model_folder=folder, backend=backend, num_blocks=64, block_size=block_size, threads=1)
    )
    greedy = SamplingParams(max_tokens=COUNT, seed=0, temperature=0.0)
    jobs = [Job(list(prompt), greedy, arrives=place) for place, prompt in enumerate(prompts)]
    answers = PlanDriver(worker).run(jobs, at_most(7))
    reference = load_reference(folder)
    assert answers == [greedy_of(reference, prompt, COUNT) for prompt in prompts]
    assert len({tuple(answer) for answer in answers}) > 1
