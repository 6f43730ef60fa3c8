"""Finds out that an engine that holds work has stopped: it is silent, and takes no steps or does not say so.

Must not know: grpc, requests, what is done about it.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

Ask = Callable[[float], Awaitable[float | None]]
"""Asks the engine for the age of its last step, in seconds, for at most so many seconds. None: no answer, no step."""


@dataclass(slots=True)
class HangWatch:
    """Of one connection. `is_busy` tells whether the engine holds work; `clock` and `sleep` are the event loop's.

    An engine whose requests all wait in its queue is silent too, so after half of `timeout_s` it is asked. A verdict
    comes between three quarters of `timeout_s` and all of it, always after a question: a pause of this process, in
    which nothing could be heard, is not held against the engine.
    """

    timeout_s: float
    is_busy: Callable[[], bool]
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    _moved_at: float = 0.0  # when we last knew that it works
    _has_work: asyncio.Event = field(default_factory=asyncio.Event)

    def heard(self) -> None:
        """A message has come."""
        self._moved_at = self.clock()

    def begin_work(self) -> None:
        """It holds work from now on."""
        self._moved_at = self.clock()
        self._has_work.set()

    async def wait(self, ask: Ask) -> None:
        """Returns when the engine hangs."""
        while True:
            if not self.is_busy():
                self._has_work.clear()
                await self._has_work.wait()
            silent = self.clock() - self._moved_at
            if silent < self.timeout_s / 2:
                await self.sleep(max(self.timeout_s / 2 - silent, self.timeout_s / 64))
                continue
            age = await ask(self.timeout_s / 4)
            if age is not None:
                self._moved_at = max(self._moved_at, self.clock() - age)
            if self.is_busy() and self.clock() - self._moved_at >= self.timeout_s * 3 / 4:
                return
            await self.sleep(self.timeout_s / 16)
