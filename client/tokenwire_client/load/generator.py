"""Sends requests by a schedule (open loop) or with so many clients (closed loop), and notes what comes of each.

In an open loop a request that cannot start on time is still counted from its intended start, so a server that stalls is
charged for all who would have come meanwhile. Must not know: transports, statistics, files.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from tokenwire_client.load.outcomes import Ending, Outcome, Part, RequestFailed, Target
from tokenwire_client.load.workload import LoadRequest

Clock = Callable[[], float]
MakeRequest = Callable[[int], LoadRequest]
_NO_USAGE = Part(0)


class Listener(Protocol):
    """Who counts."""

    def started(self, request: LoadRequest, intended: float, sent: float) -> None: ...

    def not_sent(self, request: LoadRequest, intended: float) -> None: ...

    def ended(self, outcome: Outcome) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """When a run ends: after `requests` or after `seconds` (None: not by it), the earlier; then it waits up to
    `drain_s` for answers. More than `in_flight` at a time are never sent; a request without an end within
    `timeout_s` is an error."""

    requests: int | None
    seconds: float | None
    in_flight: int = 4096
    timeout_s: float = 600.0
    drain_s: float = 120.0

    def __post_init__(self) -> None:
        if self.requests is None and self.seconds is None:
            raise ValueError("a run needs a duration or a number of requests")
        if self.requests is not None and self.requests < 1:
            raise ValueError(f"{self.requests} requests: at least 1 is needed")
        if self.in_flight < 1:
            raise ValueError(f"in-flight limit {self.in_flight} is below 1")
        for name in ("seconds", "timeout_s", "drain_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1e6:
                raise ValueError(f"{name} {value:g} is outside (0, 1000000]")


class Generator:
    """One run. `stop` ends it early: nothing more is sent, what runs is abandoned."""

    def __init__(self, target: Target, make: MakeRequest, limits: Limits, listener: Listener, clock: Clock) -> None:
        self._target = target
        self._make = make
        self._limits = limits
        self._listener = listener
        self._clock = clock
        self._stopping = asyncio.Event()
        self._running: set[asyncio.Task[None]] = set()

    @property
    def in_flight(self) -> int:
        return len(self._running)

    def stop(self) -> None:
        self._stopping.set()

    async def run_open(self, offsets: Iterator[float], begin: float) -> None:
        """Request k starts at `begin` + the k-th offset, or as soon after it as can be."""
        for number, offset in enumerate(offsets):
            if self._is_over(number, offset):
                break
            request = self._make(number)  # before its moment: making a long prompt takes time
            if not await self._wait_until(begin + offset):
                break
            if len(self._running) >= self._limits.in_flight:
                self._listener.not_sent(request, begin + offset)
            else:
                self._start(self._one(request, begin + offset))
            await asyncio.sleep(0)  # also a late generator reads the answers that are there
        if self._limits.seconds is not None and self._limits.requests is None:
            await self._wait_until(begin + self._limits.seconds)
        await self._drain()

    async def run_closed(self, clients: int, begin: float) -> None:
        """Always `clients` requests in flight."""
        if not 1 <= clients <= self._limits.in_flight:
            raise ValueError(f"{clients} clients: outside 1 to the in-flight limit of {self._limits.in_flight}")
        await self._wait_until(begin)
        numbers = itertools.count()
        workers = {self._start(self._client(numbers, begin)) for _ in range(clients)}
        await self._until_done(workers, self._limits.seconds)
        await self._drain()

    def _is_over(self, number: int, offset: float) -> bool:
        limits = self._limits
        return (
            (limits.requests is not None and number >= limits.requests)
            or (limits.seconds is not None and offset >= limits.seconds)
            or self._stopping.is_set()
        )

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return task

    async def _client(self, numbers: Iterator[int], begin: float) -> None:
        for number in numbers:
            if self._is_over(number, self._clock() - begin):
                return
            await self._one(self._make(number), None)

    async def _wait_until(self, moment: float) -> bool:
        """False: the run was stopped."""
        while (left := moment - self._clock()) > 0 and not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._stopping.wait()
        return not self._stopping.is_set()

    async def _until_done(self, tasks: set[asyncio.Task[None]], seconds: float | None) -> None:
        """Returns when all have ended, after `seconds`, or when the run is stopped."""
        if not tasks or self._stopping.is_set():
            return
        waiting = {asyncio.ensure_future(self._stopping.wait()), asyncio.ensure_future(asyncio.wait(tasks))}
        await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()

    async def _drain(self) -> None:
        """Waits for what runs, then ends the rest."""
        await asyncio.sleep(0)  # a task that never began could not say that it was abandoned
        await self._until_done(set(self._running), self._limits.drain_s)
        self._stopping.set()
        left = set(self._running)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left)

    async def _one(self, request: LoadRequest, intended: float | None) -> None:
        sent = self._clock()
        intended = sent if intended is None else intended
        self._listener.started(request, intended, sent)
        arrivals: list[tuple[float, int]] = []
        usage = _NO_USAGE
        ending, status, message = Ending.OK, "", ""
        try:
            async with asyncio.timeout(self._limits.timeout_s), aclosing(self._target.stream(request)) as parts:
                ending, usage = await self._read(request, parts, arrivals)
        except RequestFailed as failure:
            ending, status, message = Ending.ERROR, failure.status, failure.message
        except TimeoutError:
            ending, status = Ending.ERROR, "timeout"
            message = f"no whole answer within {self._limits.timeout_s:g} s"
        except asyncio.CancelledError:
            ending = Ending.ABANDONED
        except Exception as failure:  # a fault of ours must not make a request vanish from the counts
            ending, status, message = Ending.ERROR, "load_generator", f"{type(failure).__name__}: {failure}"
        self._listener.ended(
            Outcome(
                request=request,
                intended=intended,
                sent=sent,
                end=self._clock(),
                ending=ending,
                arrivals=tuple(arrivals),
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cached_tokens=usage.cached_tokens,
                status=status,
                message=message,
            )
        )

    async def _read(
        self, request: LoadRequest, parts: AsyncGenerator[Part, None], arrivals: list[tuple[float, int]]
    ) -> tuple[Ending, Part]:
        """Notes what arrives; gives how it ended and the server's counts."""
        usage, leave_at, seen = _NO_USAGE, request.cancel_after, 0
        async for part in parts:
            if part.tokens:
                arrivals.append((self._clock(), part.tokens))
                seen += part.tokens
            if part.completion_tokens is not None or part.prompt_tokens is not None:
                usage = part
            if leave_at is not None and seen >= leave_at:
                return Ending.CANCELLED, usage
        return Ending.OK, usage
