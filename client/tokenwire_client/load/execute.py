"""Does load tests: connects to the target, runs rounds, gives their figures.

Must not know: the command line, files, how results look.
"""

import asyncio
import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol

from tokenwire_client.load.arrivals import ArrivalKind, scaled, schedule
from tokenwire_client.load.generator import Generator
from tokenwire_client.load.outcomes import Target
from tokenwire_client.load.recorder import Recorder
from tokenwire_client.load.results import Round
from tokenwire_client.load.settings import RunSettings, Server, TargetKind
from tokenwire_client.load.workload import Workload

_START_DELAY_S = 0.05
_MUCH_CACHED = 0.2


class Watcher(Protocol):
    """Who shows how a round goes."""

    def watch(self, title: str, recorder: Recorder, seconds: float | None, requests: int | None) -> Awaitable[None]:
        """Runs until it is cancelled."""
        ...


class Interrupts:
    """Ctrl-C and SIGTERM while a test runs: the current round ends, no further one begins."""

    def __init__(self) -> None:
        self.seen = False
        self._stop: Callable[[], None] = lambda: None

    def attach(self, stop: Callable[[], None]) -> None:
        """`stop` ends the round that runs now."""
        self._stop = stop
        if self.seen:
            stop()

    def raise_one(self) -> None:
        self.seen = True
        self._stop()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the event loop of the main thread; a second Ctrl-C ends the process as ever."""
        loop = asyncio.get_running_loop()

        def handle() -> None:
            loop.remove_signal_handler(signal.SIGINT)
            self.raise_one()

        loop.add_signal_handler(signal.SIGINT, handle)
        loop.add_signal_handler(signal.SIGTERM, self.raise_one)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)


@contextlib.asynccontextmanager
async def connected(server: Server, keys: list[str | None]) -> AsyncIterator[Target]:
    """The target, closed afterwards. RequestFailed when an HTTP server does not tell its model."""
    target: Target
    if server.kind is TargetKind.GRPC:
        from tokenwire_client.load.grpc_target import GrpcTarget

        target = GrpcTarget(
            server.address,
            keys,
            model=server.model,
            tls=server.tls,
            chat=server.chat,
            ignore_eos=server.ignore_eos,
        )
    else:
        from tokenwire_client.load.http_target import HttpTarget, served_model

        model = server.model or await served_model(server.address, keys[0], server.tls)
        target = HttpTarget(
            server.address,
            keys,
            model=model,
            chat=server.chat,
            ignore_eos=server.ignore_eos,
            extra=server.extra,
            tls=server.tls,
        )
    try:
        yield target
    finally:
        await target.close()


async def run_rounds(settings: RunSettings, watcher: Watcher, interrupts: Interrupts) -> list[Round]:
    """Each round has the next seed. Fewer rounds when interrupted, at least one."""
    found = []
    async with connected(settings.server, [tenant.key for tenant in settings.tenants]) as target:
        for number in range(settings.rounds):
            one = dataclasses.replace(settings, seed=settings.seed + number)
            title = f"round {number + 1} of {settings.rounds}" if settings.rounds > 1 else "load"
            found.append(await run_round(one, target, watcher, interrupts, title))
            if interrupts.seen:
                break
    return found


async def run_round(
    settings: RunSettings, target: Target, watcher: Watcher, interrupts: Interrupts, title: str
) -> Round:
    """One measurement."""
    workload = Workload(settings.shape, settings.seed, settings.entries)
    begin = time.monotonic() + _START_DELAY_S
    names = [tenant.name for tenant in settings.tenants]
    recorder = Recorder(begin, settings.warmup_s, settings.targets, names, settings.seed)
    generator = Generator(target, workload.request, settings.limits, recorder, time.monotonic)
    interrupts.attach(generator.stop)
    limits = settings.limits
    watching = asyncio.ensure_future(watcher.watch(title, recorder, limits.seconds, limits.requests))
    try:
        if settings.arrivals is ArrivalKind.CLOSED:
            await generator.run_closed(settings.clients, begin)
        else:
            await generator.run_open(_offsets(settings), begin)
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    rate = settings.pace.rate if settings.pace is not None else math.nan
    found = recorder.result(_planned(settings), rate, interrupts.seen)
    return dataclasses.replace(found, notes=(*found.notes, *_notes(settings, workload, found)))


def _notes(settings: RunSettings, workload: Workload, found: Round) -> list[str]:
    """What the recorder cannot know."""
    notes = []
    if clipped := workload.clipped(found.counts.intended + found.warmup):
        notes.append(f"{clipped} recorded requests were longer than the limits and were cut.")
    is_all_new = not settings.entries and not settings.shape.prefixes
    if is_all_new and found.tokens.cached > _MUCH_CACHED * found.tokens.prompt:
        notes.append(
            f"{found.tokens.cached} of {found.tokens.prompt} prompt tokens came from the server's prefix cache, though "
            "the prompts share none: it has seen this seed before. Give another --seed."
        )
    return notes


def _offsets(settings: RunSettings) -> Iterator[float]:
    if settings.arrivals is ArrivalKind.TRACE:
        return scaled([entry.at for entry in settings.entries], settings.time_scale)
    assert settings.pace is not None
    return schedule(settings.pace, settings.seed)


def _planned(settings: RunSettings) -> float | None:
    """Seconds in which requests are sent, where that is known before."""
    return settings.limits.seconds if settings.limits.requests is None else None
