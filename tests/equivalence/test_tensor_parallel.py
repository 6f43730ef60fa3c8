"""Two ranks on gloo against one rank: whatever the scheduler does, the same tokens and the same log probabilities."""

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_service.core.sampling import SamplingParams
from engine_service.worker.build import build_worker
from engine_service.worker.config import WorkerConfig
from tests.equivalence.test_worker_architectures import MODELS
from tests.fixtures.checkpoints import HIST_VOCAB, write_hist, write_random_model
from tests.fixtures.engine_run import Answer, EngineRun, EngineSize, start_ranks
from tests.fixtures.plan_driver import Job, PlanDriver, at_most

COUNT = 24
GREEDY = SamplingParams(max_tokens=COUNT, seed=0, temperature=0.0, ignore_eos=True)
SETTINGS = [
    GREEDY,
    replace(GREEDY, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.2, logprobs=3),
    replace(GREEDY, prompt_logprobs=2, logprobs=0),
    replace(GREEDY, seed=6, temperature=1.2, top_k=30),
    replace(GREEDY, min_tokens=5, logit_bias=((7, 2.5),), banned_token_ids=frozenset({9}), bad_words=((3, 4),)),
]
# Chunks of 16, shared prefixes, and a pool that the 8 running requests outgrow.
SMALL = EngineSize(num_blocks=16, chunk=16, budget=32, overlap=True, joining=4)
PREFIX = random.Random(0).choices(range(1, HIST_VOCAB), k=40)


def requests() -> list[tuple[list[int], SamplingParams]]:
    draw = random.Random(4)
    prompts = [draw.choices(range(1, HIST_VOCAB), k=draw.choice([3, 20, 64])) for _ in range(10)]
    return [
        (PREFIX + prompt[:20] if place % 2 else prompt, replace(SETTINGS[place % len(SETTINGS)], seed=place))
        for place, prompt in enumerate(prompts)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Vocabulary and MLP do not divide evenly by two."""
    changes = {"num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 129, "vocab_size": 513}
    return write_hist(tmp_path_factory.mktemp("hist"), tokenizer=False, **changes)


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Iterator[EngineRun]:
    run = EngineRun(SMALL, folder, "torch")
    yield run
    run.close()


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> Iterator[EngineRun]:
    run = EngineRun(replace(SMALL, tensor_parallel_size=2), folder, "auto")
    yield run
    run.close()


def check_equal(got: list[Answer], expected: list[Answer]) -> None:
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in expected]
    for answer, other in zip(got, expected, strict=True):
        assert logprobs_of(answer) == pytest.approx(logprobs_of(other), abs=1e-3)


def logprobs_of(answer: Answer) -> list[float]:
    entries = [*answer.logprobs, *answer.prompt_logprobs]
    return [logprob for entry in entries for _, logprob in (*filter(None, [entry.token]), *entry.top)]


def test_batch_with_chunks_prefix_cache_and_preemption(one_rank: EngineRun, two_ranks: EngineRun) -> None:
    """Penalties, log probabilities and seeds too; the second round finds the cache warm."""
    for _ in range(2):
        expected, got = one_rank.run(requests()), two_ranks.run(requests())
        check_equal(got, expected)
    stats = two_ranks.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.cached_tokens > 0
    assert any(answer.logprobs for answer in got)
    assert any(answer.prompt_logprobs for answer in got)
    assert (stats.used_blocks, two_ranks.rows_held) == (0, 0)


def test_samples_of_one_prompt_copy_their_blocks(one_rank: EngineRun, two_ranks: EngineRun) -> None:
    few = [(prompt, replace(params, temperature=0.8)) for prompt, params in requests()[:3]]
    before = two_ranks.copies
    check_equal(two_ranks.run(few, samples=3), one_rank.run(few, samples=3))
    assert two_ranks.copies > before


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", ["llama_tied", "qwen2_bias", "qwen3_qk_norm", "mistral_window", "phi3"])
def test_architectures(name: str, ranks: int, tmp_path: Path) -> None:
    model_class, config = MODELS[name]
    folder = write_random_model(tmp_path, model_class, copied(config, num_attention_heads=8, num_key_value_heads=4))
    prompts = [random.Random(name).choices(range(300), k=length) for length in (3, 40, 17)]
    expected, got = (answers_of(folder, prompts, size) for size in (1, ranks))
    assert got == expected
    assert len({tuple(answer) for answer in got}) > 1


def copied(config: Any, **changes: Any) -> Any:
    return type(config)(**{**config.to_diff_dict(), **changes})


def answers_of(folder: Path, prompts: list[list[int]], ranks: int) -> list[list[int]]:
    config = WorkerConfig(
        model_folder=folder, backend="torch", num_blocks=64, block_size=4, threads=1, tensor_parallel_size=ranks
    )
    worker = build_worker(config, start_ranks(config))
    try:
        jobs = [Job(prompt, replace(GREEDY, max_tokens=12), arrives=place) for place, prompt in enumerate(prompts)]
        return PlanDriver(worker).run(jobs, at_most(7))
    finally:
        worker.close()
