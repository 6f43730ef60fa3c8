"""Compiles constraints off the loop: checked in a process of its own, compiled here in a thread, cached.

Must not know: requests, the loop, steps.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from llguidance import LLTokenizer

from engine_service.core.outcome import NO_GRAMMARS, Refusal, RefusalCode
from engine_service.core.sampling import StructuredOutput
from engine_service.grammar.cache import GrammarCache
from engine_service.grammar.checker_process import CheckerGone, CheckerProcess
from engine_service.grammar.limits import GrammarLimits
from engine_service.grammar.matcher import Grammar, GrammarFailure
from engine_service.grammar.vocabulary import NoVocabulary, load_vocabulary

FIELD = "request.sampling.structured_output"


class GrammarCompiler:
    """One constraint at a time; how many wait is bounded by who asks. What was refused is remembered too."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        limits: GrammarLimits,
        warn: Callable[[NoVocabulary], object],
    ) -> None:
        """`folder` holds the tokenizer; `warn` hears, in another thread, that it cannot be used."""
        self._load = partial(load_vocabulary, folder, vocab_size, eos_token_ids)
        self._warn = warn
        self._vocabulary: LLTokenizer | NoVocabulary | None = None
        self._limits = limits
        self._checker = CheckerProcess(folder, vocab_size, eos_token_ids, limits)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self.cache = GrammarCache[Grammar | Refusal](limits.max_cached, limits.max_cached_characters)

    def prepare(self) -> None:
        """Reads the vocabulary in the thread; a constraint that comes before it is there waits for it."""
        self._thread.submit(self._read_vocabulary)

    def compile(self, constraint: StructuredOutput, resumed: Sequence[int] = ()) -> "Future[object]":
        """A Grammar or a Refusal, at once for a constraint that was seen lately.

        A future that has not begun may be cancelled. With `resumed` tokens the grammar has taken them: in the
        thread, since there may be thousands.
        """
        if resumed:
            return self._thread.submit(self._find_advanced, constraint, resumed)
        found = self.cache.get(constraint)
        if found is None:
            return self._thread.submit(self._find, constraint)
        done: Future[object] = Future()
        done.set_result(found)
        return done

    def close(self) -> None:
        """Ends the checker; what still waits is cancelled."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._checker.kill()

    def _find(self, constraint: StructuredOutput) -> object:
        found = self.cache.get(constraint)  # while it waited, another one like it may have been compiled
        if found is None:
            try:
                found = self._compile(constraint)
            except CheckerGone as error:
                return Refusal(RefusalCode.FAILED, str(error))
            self.cache.put(constraint, found)
        return found

    def _find_advanced(self, constraint: StructuredOutput, resumed: Sequence[int]) -> object:
        found = self._find(constraint)
        if not isinstance(found, Grammar):
            return found
        try:
            return found.advanced(resumed)
        except GrammarFailure as error:
            return Refusal(RefusalCode.INVALID, f"structured_output: {error}", "request.resumed_token_ids")

    def _read_vocabulary(self) -> LLTokenizer | NoVocabulary:
        """Once, whatever comes of it; only the thread calls this."""
        if self._vocabulary is None:
            try:
                self._vocabulary = self._load()
            except NoVocabulary as error:
                self._vocabulary = error
                self._warn(error)
        return self._vocabulary

    def _compile(self, constraint: StructuredOutput) -> Grammar | Refusal:
        vocabulary = self._read_vocabulary()
        if isinstance(vocabulary, NoVocabulary):
            return NO_GRAMMARS
        is_good, text = self._checker.check(constraint)
        if is_good:
            try:
                return Grammar(vocabulary, text, self._limits)
            except GrammarFailure as error:
                text = str(error)
        return Refusal(RefusalCode.INVALID, f"{constraint.kind.value}: {text}", f"{FIELD}.{constraint.kind.value}")
