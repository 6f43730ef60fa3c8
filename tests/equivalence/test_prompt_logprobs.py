"""Prompt log probabilities through the engine on HIST against transformers: chunked, cached, preempted, in company."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.core.outcome import PositionLogprobs
from engine_service.core.sampling import SamplingParams
from engine_service.worker.backend import StepLogits
from engine_service.worker.input_batch import StepInput
from engine_service.worker.scored_pieces import PIECE_TOKENS
from tests.fixtures.checkpoints import HIST_VOCAB, load_reference, write_hist
from tests.fixtures.engine_run import Answer, EngineRun, EngineSize

PLAIN = SamplingParams(max_tokens=12, seed=3, temperature=0.0, ignore_eos=True)
COMMON = random.Random(5).choices(range(1, HIST_VOCAB), k=70)


def prompt_of(length: int, seed: int) -> list[int]:
    """Long ones begin alike, so that the cache could tempt."""
    own = random.Random(seed).choices(range(1, HIST_VOCAB), k=length)
    return COMMON + own[70:] if length > 70 else own


REQUESTS = [
    # The short ones go on for long: they take the pool from the long ones that come after them.
    (
        prompt_of(length, seed),
        replace(PLAIN, max_tokens=110 if length < 64 else 12, prompt_logprobs=wanted, logprobs=logprobs),
    )
    for seed, (length, wanted, logprobs) in enumerate(
        [
            (1, 5, None),
            (2, 0, 0),
            (3, 20, None),
            (40, None, 5),
            (64, 3, None),
            (65, 3, 2),
            (66, 1, None),
            (130, 20, None),
            (140, None, None),
            (250, 2, 1),
            (251, 0, None),
        ]
    )
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"), tokenizer=False)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[[list[int]], torch.Tensor]:
    """Log probabilities [length, vocabulary] after each token of a text."""
    model: Any = load_reference(folder)

    def compute(tokens: list[int]) -> torch.Tensor:
        with torch.no_grad():
            return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), dim=-1)

    return compute


@dataclass(frozen=True)
class Case:
    size: EngineSize
    preempts: bool = False


CASES = {
    "roomy": Case(EngineSize()),
    "whole": Case(EngineSize(chunk=4096, budget=4096)),
    "chunk_1": Case(EngineSize(chunk=1, budget=16)),
    "chunk_7": Case(EngineSize(chunk=7, budget=30)),
    "chunk_100": Case(EngineSize(chunk=100, budget=256)),
    "cold": Case(EngineSize(prefix_cache=False)),
    "overlapped": Case(EngineSize(overlap=True)),
    "preempted": Case(EngineSize(num_blocks=20, chunk=2), preempts=True),
    "preempted_overlapped": Case(EngineSize(num_blocks=20, chunk=2, overlap=True), preempts=True),
}


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("name", list(CASES))
def test_equals_transformers(
    name: str, backend: str, folder: Path, reference: Callable[[list[int]], torch.Tensor]
) -> None:
    """Twice, the second time with a warm cache, of which they read nothing."""
    case = CASES[name]
    run = EngineRun(case.size, folder, backend)
    first, second = run.run(REQUESTS), run.run(REQUESTS)
    for (prompt, params), answer in zip(REQUESTS, first, strict=True):
        check(answer, prompt, params, reference(prompt + answer.token_ids))
    for (_, params), one, other in zip(REQUESTS, first, second, strict=True):
        assert one.token_ids == other.token_ids
        if backend == "cpu":
            assert (one.prompt_logprobs, one.logprobs) == (other.prompt_logprobs, other.logprobs)
        assert other.finish is not None
        assert params.prompt_logprobs is None or other.finish.cached_tokens == 0
    assert (run.scheduler.stats().preemptions > 0) == case.preempts
    halfway = [new for new in run.introduced if 1 < new.known_prompt_logprobs < new.prompt_length]
    assert bool(halfway) == case.preempts
    run.close()


def check(answer: Answer, prompt: list[int], params: SamplingParams, reference: torch.Tensor) -> None:
    wanted = params.prompt_logprobs
    if wanted is None:
        assert answer.prompt_logprobs == []
        return
    assert len(answer.prompt_logprobs) == len(prompt)
    assert answer.prompt_logprobs[0] == PositionLogprobs(None, 0, ())
    for place in range(1, len(prompt)):
        check_entry(answer.prompt_logprobs[place], prompt[place], wanted, reference[place - 1])


def check_entry(entry: PositionLogprobs, token: int, wanted: int, reference: torch.Tensor) -> None:
    assert entry.token is not None
    assert entry.token == (token, pytest.approx(float(reference[token]), abs=5e-4))
    above = [int((reference > reference[token] + shift).sum()) for shift in (1e-3, -1e-3)]
    assert above[0] < entry.rank <= max(above[1], 1)
    best = reference.sort(descending=True).values[:wanted].tolist()
    assert [value for _, value in entry.top] == pytest.approx(best, abs=5e-4)
    assert [float(reference[token_id]) for token_id, _ in entry.top] == pytest.approx(best, abs=1e-3)


def test_they_fill_the_cache_for_others(folder: Path) -> None:
    run = EngineRun(EngineSize(), folder, "cpu")
    prompt = prompt_of(200, 77)
    run.run([(prompt, replace(PLAIN, prompt_logprobs=1))])
    (answer,) = run.run([(prompt, PLAIN)])
    assert answer.finish is not None
    assert answer.finish.cached_tokens == 192
    run.close()


def test_a_long_chunk_never_has_all_its_logits_at_once(folder: Path) -> None:
    """A prompt of 300 in one chunk: at most 64 rows of logits, whatever the budget of a step."""
    run = EngineRun(EngineSize(chunk=4096, budget=4096), folder, "cpu")
    runner, rows = run._built._runner, []

    class Counter:
        def run(self, step: StepInput, *, best_only: bool) -> StepLogits:
            rows.append(len(step.sample_rows))
            return runner.run(step, best_only=best_only)

    run._built._runner = Counter()  # type: ignore[assignment]
    (answer,) = run.run([(prompt_of(300, 1), replace(PLAIN, max_tokens=1, prompt_logprobs=1))])
    assert len(answer.prompt_logprobs) == 300
    assert (max(rows), sum(rows)) == (PIECE_TOKENS, 300)
    run._built._runner = runner
    run.close()
