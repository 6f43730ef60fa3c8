"""The real scheduler over the real worker: whatever the scheduler does, the tokens are the reference's."""

import random
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.core.outcome import FinishReason
from engine_service.core.request import Request
from engine_service.core.sampling import SamplingParams
from engine_service.core.scheduler import Scheduler, SchedulerConfig
from engine_service.worker.config import WorkerConfig
from engine_service.worker.threaded import ThreadedWorker
from engine_service.worker.worker import Worker, build_worker
from tests.fixtures.checkpoints import HIST_VOCAB, load_reference, write_hist
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

    num_blocks: int = 512
    block_size: int = 16
    chunk: int = 64
    budget: int = 96
    prefix_cache: bool = True
    overlap: bool = False
    rounds: int = 1
    preempts: bool = False
    hits: bool = True


CASES = {
    "roomy": Case(),
    "cold": Case(prefix_cache=False, hits=False),
    "warm": Case(rounds=2),
    "warm_overlap": Case(rounds=2, overlap=True),
    "whole_prompts": Case(chunk=4096, budget=4096),
    "chunk_1": Case(chunk=1, budget=16),
    "small_pool": Case(num_blocks=20, preempts=True),
    "small_pool_cold": Case(num_blocks=20, preempts=True, prefix_cache=False, hits=False),
    "small_pool_overlap": Case(num_blocks=20, preempts=True, overlap=True, rounds=2),
    "small_pool_block_1": Case(num_blocks=320, block_size=1, preempts=True, overlap=True),
    "small_pool_block_32": Case(num_blocks=10, block_size=32, preempts=True),
}


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, backend) for name, case in CASES.items() for backend in ("torch", "cpu") if case.block_size % 16 == 0]
    + [("small_pool_block_1", "torch")],
)
def test_tokens_are_the_references(name: str, backend: str, folder: Path, answers: list[list[int]]) -> None:
    """B046, B054, B060, B069, B072: cached = cold, preempted = not, chunked = whole, overlapped = plain."""
    case = CASES[name]
    run = EngineRun(case, folder, backend)
    for begin in range(0, case.rounds * NUM_REQUESTS, NUM_REQUESTS):
        tokens = run.round(begin)
        assert tokens == answers
    stats = run.scheduler.stats()
    assert (stats.preemptions > 0) == case.preempts
    assert (stats.cached_tokens > 0) == case.hits
    assert (stats.used_blocks, stats.running, stats.waiting) == (0, 0, 0)
    assert run.rows_held == 0


class EngineRun:
    """The engine's loop without its mailbox."""

    def __init__(self, case: Case, folder: Path, backend: str) -> None:
        self._case = case
        length = min(512, case.num_blocks * case.block_size)
        self._built = build_worker(
            WorkerConfig(
                model_folder=folder,
                backend=backend,
                num_blocks=case.num_blocks,
                block_size=case.block_size,
                max_model_len=length,
                max_num_requests=8,
                threads=1,
            )
        )
        self._worker: Worker | ThreadedWorker = ThreadedWorker(self._built) if case.overlap else self._built
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=case.block_size,
                num_blocks=case.num_blocks,
                step_token_budget=case.budget,
                prefill_chunk_size=case.chunk,
                max_num_requests=8,
                max_waiting_requests=100,
                max_waiting_tokens=10_000,
                max_model_len=length,
                eos_token_ids=frozenset({0}),
                prefix_cache=case.prefix_cache,
            )
        )

    @property
    def rows_held(self) -> int:
        return self._built._batch.num_requests

    def round(self, first_id: int) -> list[list[int]]:
        """All requests, two more at each step; their tokens."""
        waiting = deque(range(NUM_REQUESTS))
        tokens: dict[int, list[int]] = {place: [] for place in range(NUM_REQUESTS)}
        in_flight = False
        while waiting or self.scheduler.has_work:
            for _ in range(min(2, len(waiting))):
                self._submit(first_id, waiting.popleft())
            plan = self.scheduler.plan(now=0.0)
            if plan is not None:
                self._worker.submit(plan)
            settle = in_flight if self._case.overlap else plan is not None
            in_flight = plan is not None
            if settle:
                self.scheduler.apply(self._worker.result())
            for news in self.scheduler.take_news():
                tokens[news.request_id - first_id].extend(news.token_ids)
                assert news.finish is None or news.finish.reason is FinishReason.LENGTH
        return list(tokens.values())

    def _submit(self, first_id: int, place: int) -> None:
        request = Request(first_id + place, tuple(prompt_of(place)), params_of(place), arrival=float(first_id + place))
        assert self.scheduler.submit(request) is None
