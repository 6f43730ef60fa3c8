"""Every sampling parameter through the engine on HIST: token for token what a slow plain loop gives.

Alone and among neighbours that join and leave, chunked, cached, preempted, overlapped (areas 2 and 6 of the known
faults: B076, B077, B083, B087, B090, B092).
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.core.outcome import PositionLogprobs, RefusalCode
from engine_service.core.sampling import SamplingParams
from tests.fixtures.checkpoints import HIST_EOS, HIST_VOCAB, load_reference, write_hist
from tests.fixtures.engine_run import Answer, EngineRun, EngineSize
from tests.fixtures.reference_sampling import generate, logprobs_of

GREEDY = SamplingParams(max_tokens=20, seed=1, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=20, seed=9, ignore_eos=True)
# Among few tokens a history repeats itself, and penalties and bad words have something to do.
FEW = replace(GREEDY, allowed_token_ids=frozenset(range(1, 9)))
EVEN = frozenset(range(0, HIST_VOCAB, 2))
PARAMETERS = {
    "greedy": GREEDY,
    "temperature": replace(DRAWN, temperature=1.7),
    "top_k": replace(DRAWN, top_k=20, logprobs=0),
    "top_p": replace(DRAWN, top_p=0.8, logprobs=20),
    "min_p": replace(DRAWN, min_p=0.05),
    "repetition": replace(FEW, repetition_penalty=1.5, logprobs=1),
    "repetition_below_1": replace(FEW, repetition_penalty=0.6, temperature=1.0),
    "repetition_drawn": replace(DRAWN, repetition_penalty=1.3, top_p=0.9, logprobs=3),
    "presence": replace(FEW, presence_penalty=2.0),
    "frequency": replace(FEW, frequency_penalty=1.0, logprobs=20),
    "negative_penalties": replace(DRAWN, frequency_penalty=-0.5, presence_penalty=-1.0),
    "all_penalties": replace(FEW, repetition_penalty=1.5, frequency_penalty=1.0, presence_penalty=0.5, logprobs=5),
    "logit_bias": replace(GREEDY, logit_bias=((3, 6.0), (7, 6.5), (100, -100.0))),
    "logit_bias_drawn": replace(DRAWN, logit_bias=((3, 5.0), (500, 5.0)), frequency_penalty=0.7),
    "allowed": replace(GREEDY, allowed_token_ids=frozenset({3, 4, 5, 6}), frequency_penalty=0.4, logprobs=2),
    "allowed_drawn": replace(DRAWN, allowed_token_ids=frozenset(range(40))),
    "banned": replace(GREEDY, banned_token_ids=EVEN),
    "banned_drawn": replace(DRAWN, banned_token_ids=EVEN, top_k=10, logprobs=20),
    "banned_and_biased": replace(GREEDY, banned_token_ids=frozenset({9}), logit_bias=((9, 100.0), (11, 8.0))),
    "bad_words": replace(FEW, bad_words=((1,), (2, 2), (3, 4), (4, 3), (5, 6, 5), (7, 7, 8), (8, 3, 8), (6, 2, 6, 2))),
    "bad_words_drawn": replace(DRAWN, allowed_token_ids=frozenset({5, 6}), bad_words=((5, 5), (6, 6, 6), (6, 5, 6, 5))),
    "min_tokens": replace(GREEDY, min_tokens=15, ignore_eos=False, logit_bias=((HIST_EOS, 100.0),)),
}


def prompt_of(place: int) -> list[int]:
    """Every third one begins alike; some hold tokens that their completion is tempted by."""
    draw = random.Random(place)
    own = draw.choices(range(1, HIST_VOCAB), k=draw.choice([1, 5, 17, 48, 90]))
    return random.Random(99).choices(range(1, 8), k=50) + own[:9] if place % 3 == 0 else own


REQUESTS = [
    (prompt_of(place), replace(params, seed=params.seed + place, max_tokens=14 + place % 9))
    for place, params in enumerate(PARAMETERS.values())
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"), tokenizer=False)


@pytest.fixture(scope="module")
def next_logits(folder: Path) -> Callable[[list[int]], list[float]]:
    model: Any = load_reference(folder)

    def compute(tokens: list[int]) -> list[float]:
        with torch.no_grad():
            return model(torch.tensor([tokens])).logits[0, -1].tolist()

    return compute


@pytest.fixture(scope="module")
def expected(next_logits: Callable[[list[int]], list[float]]) -> list[list[int]]:
    def answer(prompt: list[int], params: SamplingParams) -> list[int]:
        tokens = generate(next_logits, prompt, params, frozenset({HIST_EOS}))
        ends = not params.ignore_eos and HIST_EOS in tokens
        return tokens[: tokens.index(HIST_EOS) + 1] if ends else tokens

    return [answer(*request) for request in REQUESTS]


NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": (),
    "banned_token_ids": frozenset(),
    "bad_words": (),
}


def test_the_parameters_matter(expected: list[list[int]], next_logits: Callable[[list[int]], list[float]]) -> None:
    """Without its parameter a request is answered differently: the cases test something."""
    for name, (prompt, params), tokens in zip(PARAMETERS, REQUESTS, expected, strict=True):
        bare = replace(params, **NEUTRAL)
        assert bare == params or generate(next_logits, prompt, bare)[: len(tokens)] != tokens, name


@pytest.fixture(scope="module", params=["cpu", "torch"])
def alone(folder: Path, request: pytest.FixtureRequest) -> tuple[str, list[Answer]]:
    run = EngineRun(EngineSize(), folder, request.param)
    answers = [run.run([one])[0] for one in REQUESTS]
    run.close()
    return request.param, answers


@pytest.mark.parametrize("place", range(len(REQUESTS)), ids=list(PARAMETERS))
def test_alone_is_the_slow_reference(place: int, alone: tuple[str, list[Answer]], expected: list[list[int]]) -> None:
    assert alone[1][place].token_ids == expected[place]


@dataclass(frozen=True)
class Case:
    size: EngineSize
    rounds: int = 1
    preempts: bool = False


CASES = {
    "together": Case(EngineSize(max_num_requests=16)),
    "taking_turns": Case(EngineSize(max_num_requests=5, joining=1), rounds=2),
    "cold": Case(EngineSize(prefix_cache=False)),
    "chunk_7": Case(EngineSize(chunk=7, budget=24), rounds=2),
    "overlapped": Case(EngineSize(overlap=True), rounds=2),
    "preempted": Case(EngineSize(num_blocks=16), preempts=True),
    "preempted_overlapped": Case(EngineSize(num_blocks=16, overlap=True, chunk=20), rounds=2, preempts=True),
}


@pytest.mark.parametrize("name", list(CASES))
def test_company_changes_nothing(
    name: str, folder: Path, alone: tuple[str, list[Answer]], expected: list[list[int]]
) -> None:
    """Log probabilities too (B061): to the bit where the backend's logits do not depend on the batch."""
    case, (backend, by_itself) = CASES[name], alone
    run = EngineRun(case.size, folder, backend)
    for _ in range(case.rounds):
        answers = run.run(REQUESTS)
        assert [answer.token_ids for answer in answers] == expected
        for answer, single in zip(answers, by_itself, strict=True):
            assert len(answer.logprobs) == len(single.logprobs)
            if backend == "cpu":
                assert answer.logprobs == single.logprobs
    assert (run.scheduler.stats().preemptions > 0) == case.preempts
    assert run.rows_held == 0
    run.close()


@pytest.mark.parametrize("place", range(len(REQUESTS)), ids=list(PARAMETERS))
def test_logprobs_are_those_of_the_models_own_logits(
    place: int, alone: tuple[str, list[Answer]], next_logits: Callable[[list[int]], list[float]]
) -> None:
    """Only who asked gets them; penalties and temperature do not show."""
    prompt, params = REQUESTS[place]
    answer = alone[1][place]
    if params.logprobs is None:
        assert answer.logprobs == []
        return
    assert len(answer.logprobs) == len(answer.token_ids)
    for count, (token, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        check_entry(entry, token, params.logprobs, logprobs_of(next_logits(prompt + answer.token_ids[:count])))


def check_entry(entry: PositionLogprobs, token: int, wanted: int, reference: list[float]) -> None:
    """Numbers within the rounding of the model; order and rank exactly, as far as that rounding lets them be."""
    assert entry.token is not None
    assert entry.token == (token, pytest.approx(reference[token], abs=5e-4))
    above = [sum(value > reference[token] + shift for value in reference) for shift in (1e-3, -1e-3)]
    assert above[0] < entry.rank <= max(above[1], 1)
    best = sorted(reference, reverse=True)[:wanted]
    assert [value for _, value in entry.top] == pytest.approx(best, abs=5e-4)
    assert [reference[token_id] for token_id, _ in entry.top] == pytest.approx(best, abs=1e-3)
    assert len({token_id for token_id, _ in entry.top}) == wanted
    assert list(entry.top) == sorted(entry.top, key=lambda pair: (-pair[1], pair[0]))


def test_a_request_that_leaves_itself_nothing_fails_alone(folder: Path, expected: list[list[int]]) -> None:
    """The client's mistake, found out too late for a refusal at the door."""
    run = EngineRun(EngineSize(), folder, "cpu")
    stuck = replace(GREEDY, allowed_token_ids=frozenset({5}), bad_words=((5, 5, 5),))
    answers = run.run([([1, 2], stuck), REQUESTS[5], REQUESTS[1]])
    finish = answers[0].finish
    assert answers[0].token_ids == [5, 5]
    assert finish is not None
    assert finish.error is not None
    assert finish.error.code is RefusalCode.INVALID
    assert "no token is left" in finish.error.message
    assert [answer.token_ids for answer in answers[1:]] == [expected[5], expected[1]]
    run.close()
