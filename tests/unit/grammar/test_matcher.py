"""Masks against an independent reference: a token may come exactly when its bytes lead to some matching text."""

import json
import random
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from engine_service.core.sampling import ConstraintKind
from engine_service.grammar.matcher import Grammar, GrammarFailure, Matcher
from engine_service.grammar.vocabulary import NoVocabulary, load_vocabulary
from tests.fixtures.checkpoints import HIST_EOS, HIST_VOCAB
from tests.fixtures.grammars import LIMITS, SCHEMAS, as_json, compiled, text_of

WORDS = ["yes", "yellow!", "no", "삼", "a|b", "<x>", "tab\t\n", '"q"', "back\\slash", "x_y-z[1]{2}", "🌶 pepper"]


def matcher_of(
    vocabulary: LLTokenizer, kind: ConstraintKind, text: str, ends: tuple[int, ...] = (HIST_EOS,)
) -> Matcher:
    grammar = compiled(vocabulary, kind, text).compiled
    assert isinstance(grammar, Grammar)
    return grammar.new_matcher(ends, lambda: 0.0)


def ids_in(mask: bytes) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(mask, dtype=np.uint8), bitorder="little")).tolist())


def token_bytes(folder: Path) -> dict[int, bytes]:
    """Of the byte-level alphabet, worked out apart from the grammar library."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    return {
        token: bytes(byte_of[character] for character in name)
        for name, token in tokenizer.get_vocab().items()
        if not name.startswith("<|")
    }


@pytest.fixture(scope="module")
def spaces(tokenizer_folder: Path) -> set[int]:
    return {token for token, text in token_bytes(tokenizer_folder).items() if not text.strip()}


@pytest.mark.parametrize("word", WORDS)
def test_a_choice_allows_its_beginnings(vocabulary: LLTokenizer, tokenizer_folder: Path, word: str) -> None:
    """Where one text is forced, one way to spell it may be: some allowed token continues each value, none another."""
    matcher = matcher_of(vocabulary, ConstraintKind.CHOICE, json.dumps(WORDS))
    spelled, known = b"", token_bytes(tokenizer_folder)
    values = [value.encode() for value in WORDS]
    while True:
        allowed = ids_in(matcher.allowed())
        assert (HIST_EOS in allowed) == (spelled in values)
        for token in allowed - {HIST_EOS}:
            assert any(value.startswith(spelled + known[token]) for value in values)
        if spelled == word.encode():
            return
        fitting = [t for t in allowed - {HIST_EOS} if word.encode().startswith(spelled + known[t])]
        assert fitting
        matcher.advance(fitting[0])
        spelled += known[fitting[0]]


def test_special_tokens_match_no_text(vocabulary: LLTokenizer) -> None:
    allowed = ids_in(matcher_of(vocabulary, ConstraintKind.REGEX, r"(.|\n)*").allowed())
    assert not allowed & {1, 2}
    assert HIST_EOS in allowed


def test_ids_without_a_token_never_come(tokenizer_folder: Path) -> None:
    wide = load_vocabulary(tokenizer_folder, HIST_VOCAB + 77, (HIST_EOS,))
    allowed = ids_in(matcher_of(wide, ConstraintKind.REGEX, r"(.|\n)*").allowed())
    assert max(allowed) < HIST_VOCAB


def test_end_tokens_come_exactly_when_the_text_is_complete(vocabulary: LLTokenizer, tokenizer_folder: Path) -> None:
    """Also one that is itself text: a request's own stop token."""
    known = {name: token for token, name in token_bytes(tokenizer_folder).items()}
    stop = known[b"b"]
    matcher = matcher_of(vocabulary, ConstraintKind.REGEX, "[ab]c", (HIST_EOS, stop))
    assert known[b"a"] in ids_in(matcher.allowed()) <= {known[text] for text in (b"a", b"ac", b"bc")}
    matcher.advance(known[b"a"])
    assert ids_in(matcher.allowed()) == {known[b"c"]}
    matcher.advance(known[b"c"])
    assert ids_in(matcher.allowed()) == {HIST_EOS, stop}
    matcher.advance(HIST_EOS)
    assert ids_in(matcher.allowed()) == {HIST_EOS, stop}


def test_a_token_outside_the_mask_is_that_completions_failure(vocabulary: LLTokenizer) -> None:
    matcher = matcher_of(vocabulary, ConstraintKind.REGEX, "a+")
    with pytest.raises(GrammarFailure):
        matcher.advance(1)
    with pytest.raises(GrammarFailure):
        matcher.allowed()


def test_a_slow_step_is_that_completions_failure(vocabulary: LLTokenizer) -> None:
    grammar = compiled(vocabulary, ConstraintKind.REGEX, "a+").compiled
    assert isinstance(grammar, Grammar)
    times = iter([0.0, LIMITS.step_cpu_s * 1.01])
    with pytest.raises(GrammarFailure, match="101 ms, at most 100 ms"):
        grammar.new_matcher((HIST_EOS,), lambda: next(times)).allowed()


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schema=SCHEMAS, seed=st.integers(0, 2**32))
def test_whatever_is_drawn_is_valid(
    vocabulary: LLTokenizer, tokenizer_folder: Path, spaces: set[int], schema: object, seed: int
) -> None:
    """The text of random allowed tokens parses and validates; replayed at any point, the mask is the same."""
    matcher = matcher_of(vocabulary, ConstraintKind.JSON_SCHEMA, as_json(schema))
    drawn, tokens = random.Random(seed), list[int]()
    for _ in range(400):
        mask = matcher.allowed()
        allowed = ids_in(mask)
        assert allowed
        if drawn.random() < 0.05:
            again = matcher_of(vocabulary, ConstraintKind.JSON_SCHEMA, as_json(schema))
            again.replay(tokens)
            assert again.allowed() == mask
        wanted = allowed if drawn.random() < 0.1 else (allowed - spaces) or allowed
        token = HIST_EOS if HIST_EOS in allowed else drawn.choice(sorted(wanted))
        if token == HIST_EOS:
            break
        matcher.advance(token)
        tokens.append(token)
    else:
        pytest.fail(f"no end: {text_of(tokenizer_folder, tokens)[-60:]}")
    checker = jsonschema.FormatChecker()
    jsonschema.validate(json.loads(text_of(tokenizer_folder, tokens)), schema, format_checker=checker)


def test_a_model_without_a_usable_tokenizer_says_so(tmp_path: Path, tokenizer_folder: Path) -> None:
    with pytest.raises(NoVocabulary, match=r"no tokenizer\.json"):
        load_vocabulary(tmp_path, 512, (0,))
    with pytest.raises(NoVocabulary, match="end-of-text"):
        load_vocabulary(tokenizer_folder, 512, ())
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "Nonsense", "vocab": {"a": 0}}}')
    with pytest.raises(NoVocabulary, match="cannot be used"):
        load_vocabulary(tmp_path, 512, (0,))
