"""Structured output on the real scheduler and worker: valid, the same in every schedule, no neighbour's business.

The reference is `jsonschema`, `re` and equality with runs of other sizes; HIST has random weights, so that it
would never write JSON by itself.
"""

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, count
from pathlib import Path

import jsonschema
import pytest
from llguidance import LLTokenizer

from engine_service.core.outcome import FinishReason, RefusalCode
from engine_service.core.sampling import ConstraintKind, SamplingParams, StructuredOutput
from engine_service.grammar.vocabulary import load_vocabulary
from tests.fixtures.checkpoints import HIST_EOS, HIST_VOCAB, write_hist
from tests.fixtures.engine_run import Answer, EngineRun, EngineSize
from tests.fixtures.grammars import as_json, compiled, schema_of, text_of

GBNF = 'root ::= item+\nitem ::= [a-c] | "(" root ")"'
LARK = 'start: NAME ("," NAME)~1..3\nNAME: /[a-z]{2,4}/'
CHOICES = ["yes", "no", '삼 \\ "quoted"', "a|b*"]
SIZES = {
    "roomy": EngineSize(),
    "overlap": EngineSize(overlap=True),
    "chunk_1": EngineSize(chunk=1, budget=16),
    "small_pool": EngineSize(num_blocks=24),
    "small_pool_overlap": EngineSize(num_blocks=24, overlap=True),
    "drafts": EngineSize(max_draft_tokens=6),
    "small_pool_drafts": EngineSize(num_blocks=24, max_draft_tokens=6),
}


def in_balance(text: str) -> bool:
    depth = 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth < 0:
            return False
    return depth == 0 and "()" not in text and re.fullmatch(r"[abc()]+", text) is not None


KINDS: dict[str, tuple[ConstraintKind, str, Callable[[str], object]]] = {
    "regex": (ConstraintKind.REGEX, "[0-9]{2}-(ja|nein)é?", re.compile("[0-9]{2}-(ja|nein)é?").fullmatch),
    "choice": (ConstraintKind.CHOICE, json.dumps(CHOICES), CHOICES.__contains__),
    "gbnf": (ConstraintKind.GRAMMAR, GBNF, in_balance),
    "lark": (ConstraintKind.GRAMMAR, LARK, re.compile("[a-z]{2,4}(,[a-z]{2,4}){1,3}").fullmatch),
    "object": (ConstraintKind.JSON_OBJECT, "", lambda text: isinstance(json.loads(text), dict)),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"))


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> LLTokenizer:
    return load_vocabulary(folder, HIST_VOCAB, (HIST_EOS,))


def prompt_of(place: int) -> list[int]:
    draw = random.Random(place)
    return draw.choices(range(3, HIST_VOCAB), k=draw.choice([3, 30, 70]))


def params_of(place: int, constraint: StructuredOutput | None) -> SamplingParams:
    """Greedy, plain, filtered and penalized rows, each with its seed."""
    sampling = (
        SamplingParams(400, place, temperature=0.0, repetition_penalty=1.3),
        SamplingParams(400, place, frequency_penalty=0.2),
        SamplingParams(400, place, temperature=1.3, top_k=40, frequency_penalty=0.2),
        SamplingParams(400, place, top_p=0.9, presence_penalty=0.5, repetition_penalty=1.2),
    )[place % 4]
    if constraint is None:
        return replace(sampling, max_tokens=40, ignore_eos=True)
    return replace(sampling, structured_output=constraint)


def mixed(vocabulary: LLTokenizer, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Every third request is free, the others have schemas."""
    requests = []
    for place in range(count):
        schema = None if place % 3 == 0 else compiled(vocabulary, ConstraintKind.JSON_SCHEMA, as_json(schema_of(place)))
        requests.append((prompt_of(place), params_of(place, schema)))
    return requests


@pytest.fixture(scope="module")
def alone(folder: Path, vocabulary: LLTokenizer) -> list[Answer]:
    """Each request of `mixed` by itself."""
    run = EngineRun(EngineSize(max_num_requests=1, joining=1), folder, "torch")
    return [run.run([request])[0] for request in mixed(vocabulary, 18)]


def test_alone_each_is_valid(folder: Path, alone: list[Answer]) -> None:
    for place, answer in enumerate(alone):
        assert answer.finish is not None
        if place % 3:
            assert answer.finish.reason is FinishReason.STOP, text_of(folder, answer.token_ids)
            assert answer.token_ids[-1] == HIST_EOS
            jsonschema.validate(json.loads(text_of(folder, answer.token_ids[:-1])), schema_of(place))


@pytest.mark.parametrize("name", SIZES)
def test_together_each_gets_the_tokens_it_gets_alone(
    name: str, folder: Path, vocabulary: LLTokenizer, alone: list[Answer]
) -> None:
    """Free ones among structured ones too; chunked, overlapped, and preempted in the middle of a text."""
    run = EngineRun(SIZES[name], folder, "torch")
    answers = run.run(mixed(vocabulary, 18))
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in alone]
    again = [new for new in run.introduced if len(new.token_ids) > new.prompt_length and new.sampling.structured_output]
    assert bool(again) == name.startswith("small_pool")
    assert run.rows_held == 0


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_constraint_is_kept(kind: str, folder: Path, vocabulary: LLTokenizer) -> None:
    which, text, is_right = KINDS[kind]
    constraint = compiled(vocabulary, which, text)
    run = EngineRun(EngineSize(), folder, "cpu")
    answers = run.run([(prompt_of(place), params_of(place, constraint)) for place in range(16)])
    ended = [answer for answer in answers if answer.finish and answer.finish.reason is FinishReason.STOP]
    # What nests without bound may go on for ever under random weights.
    assert len(ended) >= {"object": 1, "gbnf": 8}.get(kind, 16)
    for answer in ended:
        assert is_right(text_of(folder, answer.token_ids[:-1]))


def test_min_tokens_is_kept_as_long_as_the_grammar_can_go_on(folder: Path, vocabulary: LLTokenizer) -> None:
    endless = compiled(vocabulary, ConstraintKind.REGEX, "[ab]*")
    short = compiled(vocabulary, ConstraintKind.REGEX, "xyz")
    run = EngineRun(EngineSize(), folder, "torch")
    base = SamplingParams(60, 3, min_tokens=25)
    settings = [replace(base, structured_output=constraint) for constraint in (endless, short)]
    first, second = run.run([(prompt_of(place), params) for place, params in enumerate(settings)])
    assert len(first.token_ids) >= 25
    assert HIST_EOS not in first.token_ids[:25]
    assert text_of(folder, second.token_ids[:-1]) == "xyz"
    assert second.finish is not None
    assert (second.finish.reason, second.finish.stop_token_id) == (FinishReason.STOP, HIST_EOS)


def test_what_excludes_every_token_ends_that_request_alone(folder: Path, vocabulary: LLTokenizer) -> None:
    """The client's mistake, and said so; its neighbours have the tokens they have without it."""
    constraint = compiled(vocabulary, ConstraintKind.REGEX, "[0-9]{4}")
    broken = SamplingParams(30, 1, allowed_token_ids=frozenset(range(80, 90)), structured_output=constraint)
    free = [(prompt_of(place), params_of(place, None)) for place in range(4)]
    run = EngineRun(EngineSize(), folder, "torch")
    expected = [answer.token_ids for answer in run.run(free)]
    got = run.run([*free[:2], (prompt_of(9), broken), *free[2:]])
    failed = got.pop(2)
    assert [answer.token_ids for answer in got] == expected
    assert failed.finish is not None
    assert failed.finish.reason is FinishReason.ERROR
    assert failed.finish.error is not None
    assert failed.finish.error.code is RefusalCode.INVALID
    assert "structured output" in failed.finish.error.message


def test_a_grammar_that_gets_too_slow_ends_its_request_alone(
    folder: Path, vocabulary: LLTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = EngineRun(EngineSize(), folder, "torch")
    times = chain([0.0] * 16, count(1.0))  # two readings for a mask, two for a move
    monkeypatch.setattr(run._built._grammars, "_cpu_clock", lambda: next(times))
    constraint = compiled(vocabulary, ConstraintKind.REGEX, "[a-z]{30}")
    free = (prompt_of(1), params_of(1, None))
    (expected,) = EngineRun(EngineSize(), folder, "torch").run([free])
    slow, other = run.run([(prompt_of(2), params_of(2, constraint)), free])
    assert other.token_ids == expected.token_ids
    assert slow.finish is not None
    assert slow.finish.error is not None
    assert slow.finish.error.code is RefusalCode.INVALID
    assert "too complex" in slow.finish.error.message
    assert run.rows_held == len(run._built._grammars) == 0
