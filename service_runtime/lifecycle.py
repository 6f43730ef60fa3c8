"""Stops: SIGTERM, SIGINT or an operator's call ask for a graceful one, a second signal for an immediate one.

Must not know: how a service stops.
"""

import asyncio
import signal


class StopSignals:
    """Counts stop signals of this process. Install inside the running event loop."""

    def __init__(self) -> None:
        self._graceful = asyncio.Event()
        self._immediate = asyncio.Event()
        # What the call that asked for the stop wants instead of the service's own setting.
        self.grace_s: float | None = None

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note)

    def ask(self, grace_s: float | None) -> None:
        """The same as a first signal. Nothing happens when the service stops already."""
        if not self._graceful.is_set():
            self.grace_s = grace_s
            self._graceful.set()

    def _note(self) -> None:
        (self._immediate if self._graceful.is_set() else self._graceful).set()

    async def wait_graceful(self) -> None:
        """Returns at the first signal."""
        await self._graceful.wait()

    async def wait_immediate(self) -> None:
        """Returns at the second signal."""
        await self._immediate.wait()
