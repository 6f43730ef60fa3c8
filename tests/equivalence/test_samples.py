"""Sample i of n is what a request of its own with seed + i gives, whatever blocks the samples share."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from engine_service.core.sampling import SamplingParams
from tests.fixtures.checkpoints import HIST_VOCAB, load_reference, write_hist
from tests.fixtures.engine_run import EngineRun, EngineSize
from tests.fixtures.reference_sampling import boundary_distance

COUNT = 4
MAX_INT64 = 2**63 - 1
ROUNDING = 1e-5
"""Of a probability, when the sums before it are made in another order in float32."""
PARAMS = SamplingParams(max_tokens=24, seed=11, ignore_eos=True)
# Around block boundaries (16, 32), one block, less than one, several chunks.
LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 100, 129)


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(1, HIST_VOCAB), k=length)


REQUESTS = [
    (
        prompt_of(length),
        replace(PARAMS, seed=MAX_INT64 - 1 if length == 17 else 100 * length, logprobs=place % 3 or None),
    )
    for place, length in enumerate(LENGTHS)
]


def seed_of(seed: int, place: int) -> int:
    return (seed + place + 2**63) % 2**64 - 2**63


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"), tokenizer=False)


@pytest.fixture(scope="module", params=["cpu", "torch"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def single(folder: Path, backend: str) -> list[list[int]]:
    """Each sample as a request of its own, with nothing shared or reused."""
    run = EngineRun(EngineSize(prefix_cache=False), folder, backend)
    requests = [
        (prompt, replace(params, seed=seed_of(params.seed, place)))
        for prompt, params in REQUESTS
        for place in range(COUNT)
    ]
    answers = [answer.token_ids for answer in run.run(requests)]
    run.close()
    return answers


@dataclass(frozen=True)
class Case:
    """`every`: only each such request is sent, where running them takes long."""

    size: EngineSize
    preempts: bool = False
    every: int = 1


CASES = {
    "roomy": Case(EngineSize(max_num_requests=64)),
    "cold": Case(EngineSize(prefix_cache=False, max_num_requests=64)),
    "cold_overlap": Case(EngineSize(prefix_cache=False, overlap=True)),
    "whole_prompts": Case(EngineSize(chunk=4096, budget=4096, overlap=True)),
    "chunk_5": Case(EngineSize(chunk=5, budget=40, prefix_cache=False)),
    "take_turns": Case(EngineSize(max_num_requests=3, prefix_cache=False)),
    "one_at_a_time": Case(EngineSize(max_num_requests=1, prefix_cache=False), every=4),
    "block_32": Case(EngineSize(block_size=32, prefix_cache=False)),
    "small_pool": Case(EngineSize(num_blocks=14, joining=12), preempts=True),
    "small_pool_cold": Case(EngineSize(num_blocks=14, prefix_cache=False, joining=12), preempts=True),
    "small_pool_overlap": Case(EngineSize(num_blocks=14, prefix_cache=False, overlap=True, joining=12), preempts=True),
}


@pytest.mark.parametrize("name", list(CASES))
def test_a_sample_equals_a_single_request(name: str, backend: str, folder: Path, single: list[list[int]]) -> None:
    case = CASES[name]
    run = EngineRun(case.size, folder, backend)
    requests = REQUESTS[:: case.every]
    expected = [tokens for place, tokens in enumerate(single) if place // COUNT % case.every == 0]
    for _ in range(2 if backend == "cpu" else 1):  # the second time with a warm cache; torch is slow
        answers = run.run(requests, samples=COUNT)
        assert_equal_but_for_ties([answer.token_ids for answer in answers], expected, case.every, folder, backend)
        for place, answer in enumerate(answers):
            assert answer.finish is not None
            assert answer.finish.completion_tokens == PARAMS.max_tokens
            assert len(answer.logprobs) == (
                PARAMS.max_tokens if requests[place // COUNT][1].logprobs is not None else 0
            )
    stats = run.scheduler.stats()
    assert (stats.preemptions > 0) == case.preempts
    assert (run.copies > 0) == (case.size.max_num_requests > 1)
    assert (stats.used_blocks, run.rows_held) == (0, 0)
    run.close()


def assert_equal_but_for_ties(
    found: list[list[int]], expected: list[list[int]], every: int, folder: Path, backend: str
) -> None:
    """Our kernels: equal. Plain torch rounds products by the batch's shape on some CPUs: there a text may part from the
    other where the drawn number lies within rounding of the boundary between the two tokens, and only there."""
    if backend == "cpu":
        assert found == expected
        return
    requests = [(prompt, params.seed + sample) for prompt, params in REQUESTS[::every] for sample in range(COUNT)]
    for (prompt, seed), one, other in zip(requests, found, expected, strict=True):
        place = next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), None)
        if place is not None:
            tokens = [*prompt, *one[:place]]
            logits = load_reference(folder)(torch.tensor([tokens])).logits[0, -1].tolist()
            distance = boundary_distance(logits, seed, len(tokens), one[place], other[place])
            assert distance < ROUNDING, (place, one, other)


def test_samples_differ(single: list[list[int]]) -> None:
    assert len({tuple(tokens) for tokens in single}) == len(single)


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_the_prompts_blocks_are_held_once(prefix_cache: bool, folder: Path) -> None:
    """Eight samples of a prompt of 20 blocks and a bit: those 20, and one block of its own for each."""
    run = EngineRun(EngineSize(prefix_cache=prefix_cache), folder, "cpu")
    run.run([(prompt_of(16 * 20 + 5), replace(PARAMS, max_tokens=10))], samples=8)
    assert run.peak_blocks == 20 + 8
    assert run.copies == 7
    computed = run.scheduler.stats().prompt_tokens
    assert computed == 16 * 20 + 5 + 7
    run.close()


def test_prompt_log_probabilities_come_once_with_the_first_sample(folder: Path) -> None:
    run = EngineRun(EngineSize(), folder, "cpu")
    for _ in range(2):
        first, *others = run.run([(prompt_of(70), replace(PARAMS, prompt_logprobs=2))], samples=3)
        assert len(first.prompt_logprobs) == 70
        assert [answer.prompt_logprobs for answer in others] == [[], []]
        assert all(answer.finish is not None and answer.finish.cached_tokens == 0 for answer in (first, *others))
    run.close()
