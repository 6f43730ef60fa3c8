"""What the front has last seen of the engine: a step, a fault, a report. Kept by the handle, read by health.

Must not know: requests, the mailbox, what follows from it.
"""

import asyncio
from collections.abc import Callable

_NEVER = float("-inf")


class Pulse:
    """Times in seconds on `clock`. Lives on the event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reported = asyncio.Event()
        # The last step, or the moment since when one is due.
        self._moved = _NEVER
        self._stepped = _NEVER
        self._faulted = _NEVER
        # The last time when the model is known to have answered without a step of a request: its warm-up, a probe.
        self._proven = _NEVER

    def began(self) -> None:
        """A fresh engine, warmed up."""
        self._moved = self._proven = self._clock()

    def became_busy(self) -> None:
        """There is work again: a step is due."""
        self._moved = self._clock()

    def reported(self, has_stepped: bool) -> None:
        if has_stepped:
            self._moved = self._stepped = self._clock()
        self._reported.set()

    def faulted(self) -> None:
        """A request failed by itself: who knows what it left behind."""
        self._faulted = self._clock()

    def proven(self) -> None:
        """A probe was answered."""
        self._proven = self._clock()

    @property
    def silence_s(self) -> float:
        """Since a step has been due."""
        return self._clock() - self._moved

    def is_fresh(self, silence_limit_s: float) -> bool:
        """The model has answered lately, and after the last fault."""
        if self._faulted >= self._proven:
            return False
        return self._clock() - max(self._proven, self._stepped) <= silence_limit_s

    async def next_report(self, timeout_s: float) -> bool:
        """Whether one came in that time."""
        self._reported.clear()
        try:
            await asyncio.wait_for(self._reported.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
