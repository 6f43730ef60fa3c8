"""The real scheduler over the real worker: whatever the scheduler does, the tokens are the reference's."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.core.outcome import FinishReason
from engine_service.core.sampling import SamplingParams
from tests.fixtures.checkpoints import HIST_VOCAB, load_reference, write_hist
from tests.fixtures.engine_run import EngineRun, EngineSize
from tests.fixtures.reference_sampling import generate

COUNT = 30
NUM_REQUESTS = 16
PREFIX = random.Random(0).choices(range(1, HIST_VOCAB), k=70)
SETTINGS = [
    SamplingParams(max_tokens=COUNT, seed=0, temperature=0.0, ignore_eos=True),
    SamplingParams(max_tokens=COUNT, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=COUNT, seed=6, temperature=1.2, top_k=30, ignore_eos=True),
    SamplingParams(max_tokens=COUNT, seed=7, temperature=0.9, top_p=0.9, min_p=0.001, ignore_eos=True),
]


def prompt_of(place: int) -> list[int]:
    """Every second one begins with the common prefix."""
    draw = random.Random(place)
    own = draw.choices(range(1, HIST_VOCAB), k=draw.choice([3, 20, 64, 90]))
    return PREFIX + own[:20] if place % 2 else own


def params_of(place: int) -> SamplingParams:
    return replace(SETTINGS[place % len(SETTINGS)], seed=place)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"), tokenizer=False)


@pytest.fixture(scope="module")
def answers(folder: Path) -> list[list[int]]:
    model: Any = load_reference(folder)

    def next_logits(tokens: list[int]) -> list[float]:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0, -1].tolist()

    return [generate(next_logits, prompt_of(place), params_of(place)) for place in range(NUM_REQUESTS)]


@dataclass(frozen=True)
class Case:
    """`rounds`: how often all requests are sent, so that later rounds find the cache warm."""

    size: EngineSize = field(default_factory=EngineSize)
    rounds: int = 1
    preempts: bool = False
    hits: bool = True


CASES = {
    "roomy": Case(),
    "cold": Case(EngineSize(prefix_cache=False), hits=False),
    "warm": Case(rounds=2),
    "warm_overlap": Case(EngineSize(overlap=True), rounds=2),
    "whole_prompts": Case(EngineSize(chunk=4096, budget=4096)),
    "chunk_1": Case(EngineSize(chunk=1, budget=16)),
    "small_pool": Case(EngineSize(num_blocks=20), preempts=True),
    "small_pool_cold": Case(EngineSize(num_blocks=20, prefix_cache=False), preempts=True, hits=False),
    "small_pool_overlap": Case(EngineSize(num_blocks=20, overlap=True), preempts=True, rounds=2),
    "small_pool_block_1": Case(EngineSize(num_blocks=320, block_size=1, overlap=True), preempts=True),
    "small_pool_block_32": Case(EngineSize(num_blocks=10, block_size=32), preempts=True),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for name, case in CASES.items() for backend in ("torch", "cpu") if case.size.block_size % 16 == 0]
    + [("small_pool_block_1", "torch"), ("warm_overlap", "cuda"), ("small_pool_overlap", "cuda")],
)
def test_tokens_are_the_references(name: str, backend: str, folder: Path, answers: list[list[int]]) -> None:
    """B046, B054, B060, B069, B072: cached = cold, preempted = not, chunked = whole, overlapped = plain."""
    case = CASES[name]
    run = EngineRun(case.size, folder, backend)
    requests = [(prompt_of(place), params_of(place)) for place in range(NUM_REQUESTS)]
    for _ in range(case.rounds):
        got = run.run(requests)
        assert [answer.token_ids for answer in got] == answers
        assert {answer.finish and answer.finish.reason for answer in got} == {FinishReason.LENGTH}
    stats = run.scheduler.stats()
    assert (stats.preemptions > 0) == case.preempts
    assert (stats.cached_tokens > 0) == case.hits
    assert (stats.used_blocks, stats.running, stats.waiting) == (0, 0, 0)
    assert run.rows_held == 0
