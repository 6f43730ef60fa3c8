"""The compiler with its checker process: bad constraints are refused in words and in time, good ones are kept."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engine_service.core.outcome import NO_GRAMMARS, Refusal, RefusalCode
from engine_service.core.sampling import ConstraintKind, StructuredOutput
from engine_service.grammar.compiler import GrammarCompiler
from engine_service.grammar.limits import GrammarLimits
from engine_service.grammar.matcher import Grammar
from engine_service.grammar.vocabulary import NoVocabulary
from tests.fixtures.checkpoints import HIST_EOS, HIST_VOCAB
from tests.fixtures.hostile_grammars import HARMLESS, REFUSED

# Of the whole check, the start of a checker that was killed before included; on a busy machine.
BOUND_S = 20.0
SLOW = '{"type": "integer", "multipleOf": 999983}'


def new_compiler(folder: Path, limits: GrammarLimits) -> GrammarCompiler:
    return GrammarCompiler(folder, HIST_VOCAB, (HIST_EOS,), limits, pytest.fail)


@pytest.fixture(scope="module")
def compiler(tokenizer_folder: Path) -> Iterator[GrammarCompiler]:
    compiler = new_compiler(tokenizer_folder, GrammarLimits())
    yield compiler
    compiler.close()


def find(compiler: GrammarCompiler, kind: ConstraintKind, text: str) -> object:
    return compiler.compile(StructuredOutput(kind, text)).result(BOUND_S)


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_constraint_is_refused_in_words(compiler: GrammarCompiler, name: str) -> None:
    kind, text, words = REFUSED[name]
    found = find(compiler, kind, text)
    assert isinstance(found, Refusal), name
    assert found.code is RefusalCode.INVALID
    assert found.field == f"request.sampling.structured_output.{kind.value}"
    assert words in found.message
    assert len(found.message) < 400
    assert "\n" not in found.message
    assert "Error" not in found.message.replace("Parser Error", "")


@pytest.mark.parametrize("name", HARMLESS)
def test_a_large_but_harmless_one_is_compiled(compiler: GrammarCompiler, name: str) -> None:
    found = find(compiler, *HARMLESS[name])
    assert isinstance(found, Grammar), found


def test_what_takes_too_long_ends_with_its_checker(tokenizer_folder: Path) -> None:
    """A number theorist's schema; the next constraint finds a new one."""
    limits = replace(GrammarLimits(), check_cpu_s=1, max_lexer_states=10**7)
    compiler = new_compiler(tokenizer_folder, limits)
    try:
        begin = time.monotonic()
        found = find(compiler, ConstraintKind.JSON_SCHEMA, SLOW)
        assert isinstance(found, Refusal)
        assert (
            found.message
            == "json_schema: the grammar is too complex: checking it was stopped after 1 s of CPU time or 10 s"
        )
        assert time.monotonic() - begin < BOUND_S
        assert isinstance(find(compiler, ConstraintKind.REGEX, "ab"), Grammar)
        # It is remembered: the second time costs nothing.
        assert compiler.compile(StructuredOutput(ConstraintKind.JSON_SCHEMA, SLOW)).done()
    finally:
        compiler.close()


def test_slow_constraints_give_way_to_the_others(tokenizer_folder: Path) -> None:
    """A flood of distinct ones that would each be checked for minutes: those behind it wait a moment for each."""
    limits = replace(GrammarLimits(), check_cpu_s=300, check_wall_s=900.0, max_lexer_states=10**8)
    compiler = new_compiler(tokenizer_folder, limits)
    try:
        assert isinstance(find(compiler, ConstraintKind.REGEX, "ab"), Grammar)
        hostile = [
            compiler.compile(StructuredOutput(ConstraintKind.JSON_SCHEMA, SLOW.replace("83", f"{number}")))
            for number in range(10, 17)
        ]
        good = [compiler.compile(StructuredOutput(ConstraintKind.REGEX, f"a{number}")) for number in range(5)]
        assert all(isinstance(future.result(3 * BOUND_S), Grammar) for future in good)
        refused = [future.result(0) for future in hostile if future.done()]
        assert len(hostile) - len(refused) <= limits.max_patient
        assert {found.code for found in refused if isinstance(found, Refusal)} == {RefusalCode.QUEUE_FULL}
    finally:
        compiler.close()


def test_a_checker_that_is_killed_while_idle_is_no_verdict(tokenizer_folder: Path) -> None:
    """Its successor answers what it is asked, and nothing else."""
    compiler = new_compiler(tokenizer_folder, GrammarLimits())
    try:
        assert isinstance(find(compiler, ConstraintKind.REGEX, "a"), Grammar)
        process = compiler._quick._process
        assert process is not None
        for number in range(3):
            (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(child), signal.SIGKILL)
            found = find(compiler, ConstraintKind.REGEX, f"b{number}")
            assert isinstance(found, Grammar)
            assert isinstance(find(compiler, ConstraintKind.REGEX, f"(c{number}"), Refusal)
    finally:
        compiler.close()


def test_what_needs_too_much_memory_ends_with_its_checker(tokenizer_folder: Path) -> None:
    limits = replace(GrammarLimits(), check_memory_bytes=256 * 1024**2, max_repeats=10**12, check_cpu_s=20)
    compiler = new_compiler(tokenizer_folder, limits)
    try:
        found = find(compiler, ConstraintKind.REGEX, "a{100000000}")
        assert isinstance(found, Refusal)
        assert "too complex" in found.message or "failed" in found.message or "too many" in found.message
        assert isinstance(find(compiler, ConstraintKind.REGEX, "ab"), Grammar)
    finally:
        compiler.close()


def test_the_cache_is_bounded(tokenizer_folder: Path) -> None:
    limits = replace(GrammarLimits(), max_cached=4)
    compiler = new_compiler(tokenizer_folder, limits)
    try:
        for place in range(12):
            find(compiler, ConstraintKind.REGEX, f"a{{{place + 1}}}")
        assert len(compiler.cache) == 4
        assert compiler.compile(StructuredOutput(ConstraintKind.REGEX, "a{12}")).done()
    finally:
        compiler.close()


def test_closing_ends_the_checker(tokenizer_folder: Path) -> None:
    compiler = new_compiler(tokenizer_folder, GrammarLimits())
    find(compiler, ConstraintKind.REGEX, "a")
    process = compiler._quick._process
    assert process is not None
    compiler.close()
    process.wait(10)
    with pytest.raises(ProcessLookupError):
        os.kill(process.pid, 0)


def test_a_constraint_that_comes_before_the_vocabulary_waits_for_it(tokenizer_folder: Path) -> None:
    compiler = new_compiler(tokenizer_folder, GrammarLimits())
    try:
        compiler.prepare()
        assert isinstance(find(compiler, ConstraintKind.REGEX, "a"), Grammar)
    finally:
        compiler.close()


def test_without_a_tokenizer_every_constraint_is_refused_and_the_reason_told_once(tmp_path: Path) -> None:
    told: list[NoVocabulary] = []
    compiler = GrammarCompiler(tmp_path, HIST_VOCAB, (HIST_EOS,), GrammarLimits(), told.append)
    try:
        compiler.prepare()
        assert find(compiler, ConstraintKind.REGEX, "a") == NO_GRAMMARS
        assert find(compiler, ConstraintKind.JSON_SCHEMA, "{}") == NO_GRAMMARS
    finally:
        compiler.close()
    assert [str(error) for error in told] == ["the model has no tokenizer.json"]
