"""A request cut after any token and resumed on another engine goes on as if nothing had been.

The reference is the same request uninterrupted, which other suites compare with a slow plain loop.
"""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from llguidance import LLTokenizer

from engine_service.core.outcome import PositionLogprobs
from engine_service.core.sampling import ConstraintKind, SamplingParams
from engine_service.grammar.matcher import Grammar, GrammarFailure
from engine_service.grammar.vocabulary import load_vocabulary
from tests.equivalence.test_sampling_parameters import PARAMETERS, prompt_of
from tests.fixtures.checkpoints import HIST_EOS, HIST_VOCAB, write_hist
from tests.fixtures.engine_run import Answer, EngineRun, EngineSize
from tests.fixtures.grammars import as_json, compiled, schema_of

Requests = list[tuple[list[int], SamplingParams]]
SIZES = {
    "roomy": EngineSize(),
    "cold": EngineSize(prefix_cache=False),
    "chunk_1": EngineSize(chunk=1, budget=16),
    "small_pool": EngineSize(num_blocks=20),
    "small_pool_overlap": EngineSize(num_blocks=20, overlap=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"))


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> LLTokenizer:
    return load_vocabulary(folder, HIST_VOCAB, (HIST_EOS,))


@pytest.fixture(scope="module")
def requests(vocabulary: LLTokenizer) -> Requests:
    """Every sampling parameter, and texts under a schema."""
    plain = [
        (prompt_of(place), replace(params, seed=params.seed + place, max_tokens=14 + place % 9))
        for place, params in enumerate(PARAMETERS.values())
    ]
    return plain + [
        (prompt_of(place), SamplingParams(200, place, frequency_penalty=0.2, structured_output=schema, logprobs=1))
        for place in range(4)
        for schema in [compiled(vocabulary, ConstraintKind.JSON_SCHEMA, as_json(schema_of(place)))]
    ]


@pytest.fixture(scope="module")
def whole(folder: Path, requests: Requests) -> list[Answer]:
    run = EngineRun(EngineSize(), folder, "cpu")
    answers = run.run(requests)
    run.close()
    return answers


def resumable(params: SamplingParams, tokens: Sequence[int]) -> SamplingParams:
    """As the engine's desk hands it on: the grammar has taken the tokens."""
    output = params.structured_output
    if output is None:
        return params
    assert isinstance(output.compiled, Grammar)
    return replace(params, structured_output=replace(output, compiled=output.compiled.advanced(tokens)))


def close_to(got: Sequence[PositionLogprobs], wanted: Sequence[PositionLogprobs]) -> bool:
    """The same tokens and ranks; what is computed in another batch may differ in the last bits."""
    flat = [
        [(entry.rank, pair) for entry in entries for pair in [entry.token or (-1, 0.0), *entry.top]]
        for entries in (got, wanted)
    ]
    return all((a[0], a[1][0]) == (b[0], b[1][0]) and abs(a[1][1] - b[1][1]) < 1e-4 for a, b in zip(*flat, strict=True))


def check(run: EngineRun, requests: Requests, whole: list[Answer], cuts: list[tuple[int, int]]) -> None:
    """`cuts`: (request, tokens that it has when it is cut)."""
    resumed = [whole[place].token_ids[:count] for place, count in cuts]
    sent = [
        (requests[place][0], resumable(requests[place][1], tokens))
        for (place, _), tokens in zip(cuts, resumed, strict=True)
    ]
    for (place, count), answer in zip(cuts, run.run(sent, resumed=resumed), strict=True):
        wanted = whole[place]
        assert answer.token_ids == wanted.token_ids[count:], (place, count)
        assert close_to(answer.logprobs, wanted.logprobs[count:])
        assert answer.finish is not None
        assert wanted.finish is not None
        assert replace(answer.finish, cached_tokens=0) == replace(wanted.finish, cached_tokens=0)
        assert answer.finish.cached_tokens <= len(requests[place][0])
    assert run.rows_held == 0


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_cut_after_every_token(folder: Path, requests: Requests, whole: list[Answer], backend: str) -> None:
    every = [(place, count) for place, answer in enumerate(whole) for count in range(1, len(answer.token_ids))]
    run = EngineRun(EngineSize(), folder, backend)
    check(run, requests, whole, random.Random(0).sample(every, 60) if backend == "torch" else every)
    run.close()


@pytest.mark.parametrize("name", SIZES)
def test_resumed_under_every_schedule(name: str, folder: Path, requests: Requests, whole: list[Answer]) -> None:
    """Chunked, cached, preempted after the resumption, overlapped; resumed twice in a row."""
    run = EngineRun(SIZES[name], folder, "cpu")
    for turn in range(2):
        draw = random.Random(turn)
        cuts = [(place, draw.randrange(1, len(answer.token_ids))) for place, answer in enumerate(whole)]
        check(run, requests, whole, cuts)
    assert (run.scheduler.stats().preemptions > 0) == name.startswith("small_pool")
    run.close()


def test_a_grammar_refuses_tokens_that_do_not_fit(vocabulary: LLTokenizer) -> None:
    grammar = compiled(vocabulary, ConstraintKind.REGEX, "[ab]*").compiled
    assert isinstance(grammar, Grammar)
    a, b, c = (3 + sorted_bytes().index(letter) for letter in "abc")
    assert grammar.advanced([a, b, a]).num_taken == 3
    with pytest.raises(GrammarFailure, match="token 2 of the 4 tokens so far does not match the grammar"):
        grammar.advanced([a, b, c, a])
    assert grammar.advanced([b]).advanced([a]).num_taken == 2


def sorted_bytes() -> list[str]:
    """The letters of the byte tokenizer after its three specials, in the order of their ids."""
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())
