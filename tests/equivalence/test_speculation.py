"""Drafts change how many steps a text takes, never the text: real scheduler and worker, with and without.

The reference is the same request without drafts, which other suites compare with a slow plain loop. Texts of few
different tokens repeat themselves, so that guesses are right, wrong, and right in part.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine_service.core.outcome import PositionLogprobs
from engine_service.core.sampling import SamplingParams
from engine_service.worker.config import WeightFormat
from tests.equivalence.test_sampling_parameters import PARAMETERS, prompt_of
from tests.fixtures.checkpoints import HIST_EOS, write_hist
from tests.fixtures.engine_run import Answer, EngineRun, EngineSize

Requests = list[tuple[list[int], SamplingParams]]
FEW = frozenset({3, 4, 5})
SIZES = {
    "roomy": EngineSize(max_draft_tokens=8),
    "cold": EngineSize(prefix_cache=False, max_draft_tokens=3),
    "chunk_2": EngineSize(chunk=2, budget=16, max_draft_tokens=8),
    "no_room": EngineSize(budget=8, chunk=8, max_draft_tokens=8),
    "small_pool": EngineSize(num_blocks=20, max_draft_tokens=8),
    "overlap": EngineSize(overlap=True, max_draft_tokens=8),
    "small_pool_overlap": EngineSize(num_blocks=20, overlap=True, max_draft_tokens=8),
}


def repeating(place: int) -> tuple[list[int], SamplingParams]:
    """A prompt of three tokens, and a text of the same three, drawn or the most likely ones."""
    draw = random.Random(place)
    prompt = draw.choices(sorted(FEW), k=draw.choice([1, 2, 40, 70]))
    stops = draw.choice([frozenset(), frozenset(), frozenset({3})])
    most = draw.choice([2, 30, 60, 60])
    return prompt, SamplingParams(
        max_tokens=most,
        seed=place,
        min_tokens=min(most, draw.choice([0, 0, 1, 20])) if stops else 0,
        temperature=draw.choice([0.0, 0.7, 1.0]),
        top_p=draw.choice([1.0, 0.9]),
        stop_token_ids=stops,
        frequency_penalty=draw.choice([0.0, 0.3, -0.3]),
        allowed_token_ids=FEW | {HIST_EOS} if place % 4 == 0 else FEW,
        logprobs=draw.choice([None, None, 2]),
    )


def every_parameter() -> Requests:
    return [
        (prompt_of(place), replace(params, seed=params.seed + place, max_tokens=14 + place % 9))
        for place, params in enumerate(PARAMETERS.values())
    ]


REQUESTS = every_parameter() + [repeating(place) for place in range(20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"))


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Answer]:
    run = EngineRun(EngineSize(), folder, "cpu")
    answers = run.run(REQUESTS)
    run.close()
    return answers


def close_to(got: Sequence[PositionLogprobs], wanted: Sequence[PositionLogprobs], error: float) -> bool:
    pairs = [
        (a, b)
        for entry, other in zip(got, wanted, strict=True)
        for a, b in zip((entry.token, *entry.top), (other.token, *other.top), strict=True)
    ]
    ranks = [entry.rank for entry in got] == [entry.rank for entry in wanted]
    return ranks and all(a and b and a[0] == b[0] and abs(a[1] - b[1]) <= error for a, b in pairs)


def check(answers: list[Answer], wanted: list[Answer], error: float) -> None:
    for place, (answer, other) in enumerate(zip(answers, wanted, strict=True)):
        assert answer.token_ids == other.token_ids, place
        assert close_to(answer.logprobs, other.logprobs, error), place
        assert answer.finish is not None
        assert other.finish is not None
        assert replace(answer.finish, cached_tokens=0) == replace(other.finish, cached_tokens=0), place


@pytest.mark.parametrize(("name", "backend"), [*((name, "cpu") for name in SIZES), ("cold", "torch")])
def test_the_text_is_that_without_drafts(name: str, backend: str, folder: Path, plain: list[Answer]) -> None:
    """By the kernels the log probabilities are the same to the last bit."""
    run = EngineRun(SIZES[name], folder, backend)
    check(run.run(REQUESTS), plain, 0.0 if backend == "cpu" else 1e-4)
    stats = run.scheduler.stats()
    run.close()
    assert run.rows_held == 0
    assert (stats.preemptions > 0) == name.startswith("small_pool")
    assert stats.generated_tokens == sum(len(answer.token_ids) for answer in plain)
    if name != "no_room" and not name.endswith("overlap"):  # there a request's last token is hardly ever known in time
        assert 60 < stats.accepted_tokens < stats.drafted_tokens


@pytest.mark.parametrize("weight_format", [WeightFormat.INT4, WeightFormat.INT8])
def test_the_text_is_that_without_drafts_in_few_bits(weight_format: WeightFormat, folder: Path) -> None:
    requests = [repeating(place) for place in range(40, 52)]
    size = EngineSize(weight_format=weight_format)
    one, other = (EngineRun(replace(size, max_draft_tokens=count), folder, "cpu") for count in (0, 6))
    check(other.run(requests), one.run(requests), 0.0)
    assert other.scheduler.stats().accepted_tokens > 0
    one.close()
    other.close()


def test_samples_of_a_prompt(folder: Path) -> None:
    requests = [repeating(place) for place in range(30, 36)]
    one, other = (EngineRun(EngineSize(max_draft_tokens=count), folder, "cpu") for count in (0, 6))
    check(other.run(requests, samples=3), one.run(requests, samples=3), 0.0)
    assert other.scheduler.stats().accepted_tokens > 0
    one.close()
    other.close()


def test_resumed_after_every_token(folder: Path, plain: list[Answer]) -> None:
    """A stream that ends in the middle of a draft's tokens goes on elsewhere: what was given is given once."""
    run = EngineRun(SIZES["roomy"], folder, "cpu")
    places = [place for place in range(len(PARAMETERS), len(REQUESTS)) if len(plain[place].token_ids) > 1]
    cuts = [(place, random.Random(place).randrange(1, len(plain[place].token_ids))) for place in places]
    answers = run.run(
        [REQUESTS[place] for place, _ in cuts], resumed=[plain[place].token_ids[:count] for place, count in cuts]
    )
    assert run.scheduler.stats().accepted_tokens > 0
    run.close()
    for (place, count), answer in zip(cuts, answers, strict=True):
        assert answer.token_ids == plain[place].token_ids[count:], (place, count)


def test_fewer_steps(folder: Path) -> None:
    """What it is for: a text that repeats itself takes fewer steps than tokens."""
    request = ([3, 4, 5] * 20, SamplingParams(60, 0, temperature=0.0, logit_bias=tuple((t, 1000.0) for t in FEW)))
    run = EngineRun(EngineSize(max_draft_tokens=8), folder, "cpu")
    (answer,) = run.run([request])
    stats = run.scheduler.stats()
    run.close()
    assert len(answer.token_ids) == 60
    assert stats.steps < 40
