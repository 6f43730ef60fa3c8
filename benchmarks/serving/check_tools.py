"""What the checks share: findings, our services for the time of a check, streams that run in the background.

Must not know: any particular check.
"""

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from benchmarks.serving.closed_loop import Send
from benchmarks.serving.processes import GroupProcess
from benchmarks.serving.services import Engine, Services, start_engine, start_services
from benchmarks.serving.workload import BenchRequest, WordList

START_TIMEOUT_S = 180.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One figure and its limit: an upper one, or a lower one with `is_floor`."""

    name: str
    value: float
    limit: float
    unit: str
    detail: str = ""
    is_floor: bool = False

    @property
    def holds(self) -> bool:
        return self.value >= self.limit if self.is_floor else self.value <= self.limit

    def line(self) -> str:
        sign = ">=" if self.is_floor else "<="
        verdict = "ok    " if self.holds else "MISSED"
        return (
            f"{verdict} {self.name}: {self.value:.3g} {self.unit} (wanted {sign} {self.limit:g}) {self.detail}".rstrip()
        )


@dataclass(frozen=True, slots=True)
class Setting:
    """What every check gets. `requests[c]`: how many at concurrency c, where it is not the default."""

    model: Path
    words: WordList
    logs: Path
    threads: int
    engine_flags: tuple[str, ...]
    requests: Mapping[int, int]
    seed: int

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--threads", str(self.threads), *self.engine_flags)


@contextlib.asynccontextmanager
async def own_services(setting: Setting, *flags: str) -> AsyncIterator[Services]:
    """Both services with those flags of the engine added; ended afterwards."""
    processes: list[GroupProcess] = []
    deadline = time.monotonic() + START_TIMEOUT_S
    log = setting.logs / "check.log"
    try:
        yield await start_services(
            setting.model, log, (*setting.flags, *flags), (), dict(os.environ), deadline, processes.append
        )
    finally:
        await _stop(processes)


@contextlib.asynccontextmanager
async def own_engine(setting: Setting, *flags: str) -> AsyncIterator[Engine]:
    """The engine service alone; ended afterwards."""
    processes: list[GroupProcess] = []
    deadline = time.monotonic() + START_TIMEOUT_S
    log = setting.logs / "check.log"
    try:
        yield await start_engine(
            setting.model, log, (*setting.flags, *flags), dict(os.environ), deadline, processes.append
        )
    finally:
        await _stop(processes)


async def _stop(processes: Sequence[GroupProcess]) -> None:
    for process in reversed(processes):
        await process.stop()


@dataclass(slots=True)
class Streams:
    """Requests that generate in the background until they are left; when each of their messages arrived."""

    send: Send
    clock: Callable[[], float]
    arrivals: list[list[float]] = field(default_factory=list)
    _tasks: list["asyncio.Task[int | None]"] = field(default_factory=list)
    _moved: asyncio.Event = field(default_factory=asyncio.Event)

    def start(self, requests: Sequence[BenchRequest]) -> None:
        for request in requests:
            times: list[float] = []
            self.arrivals.append(times)
            self._tasks.append(asyncio.create_task(self._follow(request, times)))

    async def _follow(self, request: BenchRequest, times: list[float]) -> int | None:
        def note(_: int) -> None:
            times.append(self.clock())
            self._moved.set()

        try:
            return await self.send(request, note)
        finally:
            self._moved.set()

    async def progress(self, messages: int) -> None:
        """Returns when each stream has had that many more messages. RuntimeError when one ends before."""
        wanted = [len(times) + messages for times in self.arrivals]
        while any(len(times) < count for times, count in zip(self.arrivals, wanted, strict=True)):
            if ended := [task for task in self._tasks if task.done()]:
                raise RuntimeError(f"a stream ended early: {ended[0].exception() or 'it had too few tokens'}")
            self._moved.clear()
            await self._moved.wait()

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between two messages of a stream, those gaps that overlap the time from `begin` to `end`."""
        return [
            later - earlier
            for times in self.arrivals
            for earlier, later in pairwise(times)
            if later > begin and earlier < end
        ]

    async def leave(self) -> None:
        """Cancels all of them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
