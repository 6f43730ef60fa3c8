"""Compiles constraints off the loop: checked in a process of its own, compiled here in a thread, cached.

Most checks take milliseconds, and one after the other is fair to them. One that takes longer gives way: it goes to a
second checker with more patience and few places, so that hostile constraints delay the others by little each.
Must not know: requests, the loop, steps.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
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

_RETRY_AFTER_S = 1.0
FIELD = "request.sampling.structured_output"


@dataclass(frozen=True, slots=True)
class _Job:
    """A constraint, the tokens it has taken already, and what will come of it."""

    constraint: StructuredOutput
    resumed: Sequence[int]
    future: "Future[object]" = field(default_factory=Future)

    def settle(self, found: object) -> None:
        """Unless nobody wants it any more."""
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(found)


class GrammarCompiler:
    """How many constraints wait is bounded by who asks. What was refused is remembered too."""

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
        self._quick, self._patient = (CheckerProcess(folder, vocab_size, eos_token_ids, limits) for _ in range(2))
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._patient_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-patient")
        self._patient_places = threading.BoundedSemaphore(limits.max_patient)
        self.cache = GrammarCache[Grammar | Refusal](limits.max_cached, limits.max_cached_characters)

    def prepare(self) -> None:
        """Reads the vocabulary in the thread; a constraint that comes before it is there waits for it."""
        self._thread.submit(self._read_vocabulary)

    def compile(self, constraint: StructuredOutput, resumed: Sequence[int] = ()) -> "Future[object]":
        """A Grammar or a Refusal, at once for a constraint that was seen lately.

        A future that has not begun may be cancelled. With `resumed` tokens the grammar has taken them: in the
        thread, since there may be thousands.
        """
        job = _Job(constraint, resumed)
        found = None if resumed else self.cache.get(constraint)
        if found is None:
            self._submit(self._thread, self._run_quick, job)
        else:
            job.future.set_result(found)
        return job.future

    def close(self) -> None:
        """Ends the checkers; what still waits is cancelled."""
        for thread in (self._thread, self._patient_thread):
            thread.shutdown(wait=False, cancel_futures=True)
        for checker in (self._quick, self._patient):
            checker.kill()

    def _submit(self, thread: ThreadPoolExecutor, run: Callable[["_Job"], None], job: "_Job") -> None:
        """A job that will never be run is cancelled."""
        thread.submit(run, job).add_done_callback(lambda ran: job.future.cancel() if ran.cancelled() else None)

    def _run_quick(self, job: "_Job") -> None:
        if job.future.cancelled():
            return
        found = self._find(job, self._quick, self._limits.quick_cpu_s)
        if found is not None:
            job.settle(found)
        elif self._patient_places.acquire(blocking=False):
            self._submit(self._patient_thread, self._run_patient, job)
        else:
            message = f"{self._limits.max_patient} grammars that take long are being checked, which is the limit"
            job.settle(Refusal(RefusalCode.QUEUE_FULL, message, retry_after_s=_RETRY_AFTER_S))

    def _run_patient(self, job: "_Job") -> None:
        try:
            if job.future.cancelled():
                return
            found = self._find(job, self._patient, self._limits.check_cpu_s)
            if found is None:
                found = self._refusal(job.constraint, self._too_complex())
                self.cache.put(job.constraint, found)
            job.settle(found)
        finally:
            self._patient_places.release()

    def _too_complex(self) -> str:
        cpu, wall = self._limits.check_cpu_s, self._limits.check_wall_s
        return f"the grammar is too complex: checking it was stopped after {cpu} s of CPU time or {wall:g} s"

    def _find(self, job: "_Job", checker: CheckerProcess, cpu_s: float) -> Grammar | Refusal | None:
        """None when the check took more than `cpu_s`."""
        found = self.cache.get(job.constraint)  # while it waited, another one like it may have been compiled
        try:
            if found is None:
                found = self._compile(job.constraint, checker, cpu_s)
                if found is not None:
                    self.cache.put(job.constraint, found)
            return self._advanced(found, job.resumed) if isinstance(found, Grammar) and job.resumed else found
        except CheckerGone as error:
            return Refusal(RefusalCode.FAILED, str(error))
        except Exception:
            return Refusal(RefusalCode.FAILED, "the grammar could not be compiled")

    def _advanced(self, found: Grammar, resumed: Sequence[int]) -> Grammar | Refusal:
        try:
            return found.advanced(resumed)
        except GrammarFailure as error:
            return Refusal(RefusalCode.INVALID, f"structured_output: {error}", "request.resumed_token_ids")

    def _read_vocabulary(self) -> LLTokenizer | NoVocabulary:
        """Once, whatever comes of it; the quick thread calls it first."""
        if self._vocabulary is None:
            try:
                self._vocabulary = self._load()
            except NoVocabulary as error:
                self._vocabulary = error
                self._warn(error)
        return self._vocabulary

    def _compile(self, constraint: StructuredOutput, checker: CheckerProcess, cpu_s: float) -> Grammar | Refusal | None:
        vocabulary = self._read_vocabulary()
        if isinstance(vocabulary, NoVocabulary):
            return NO_GRAMMARS
        verdict = checker.check(constraint, cpu_s)
        if verdict is None:
            return None
        is_good, text = verdict
        if is_good:
            try:
                return Grammar(vocabulary, text, self._limits)
            except GrammarFailure as error:
                text = str(error)
        return self._refusal(constraint, text)

    def _refusal(self, constraint: StructuredOutput, text: str) -> Refusal:
        return Refusal(RefusalCode.INVALID, f"{constraint.kind.value}: {text}", f"{FIELD}.{constraint.kind.value}")
