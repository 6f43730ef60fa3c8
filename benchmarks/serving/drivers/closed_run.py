"""A closed loop for engines that are called step by step: what to submit next, and the records of it all.

Standard library only: it runs inside the interpreters of peers. Must not know: any engine.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.serving.records import Record


@dataclass(frozen=True, slots=True)
class Job:
    """One request as a driver gets it."""

    key: int
    token_ids: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Progress:
    """News of one request after a step: new tokens, and whether it has ended (with an error or well)."""

    key: int
    tokens: int
    finished: bool
    error: str | None = None


@dataclass(slots=True)
class _Live:
    sent: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)


class ClosedRun:
    """Keeps `concurrency` jobs in flight until there are none left. The caller submits what it is given."""

    def __init__(self, jobs: Sequence[Job], concurrency: int, clock: Callable[[], float]) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency {concurrency} is below 1")
        self._left: Iterator[Job] = iter(jobs)
        self._room = concurrency
        self._clock = clock
        self._live: dict[int, _Live] = {}
        self.records: list[Record] = []

    @property
    def is_done(self) -> bool:
        """Nothing is in flight; true before the first `take`, too."""
        return not self._live

    def take(self) -> list[Job]:
        """Jobs to submit now; from here their time counts."""
        jobs: list[Job] = []
        while self._room > 0 and (job := next(self._left, None)) is not None:
            self._room -= 1
            self._live[job.key] = _Live(self._clock())
            jobs.append(job)
        return jobs

    def note(self, progress: Progress) -> None:
        """KeyError for a job that is not in flight."""
        now = self._clock()
        live = self._live[progress.key]
        if progress.tokens:
            live.arrivals.append((now, progress.tokens))
        if progress.finished:
            del self._live[progress.key]
            self._room += 1
            record = Record(progress.key, live.sent, tuple(live.arrivals), now, None, progress.error)
            self.records.append(record)
