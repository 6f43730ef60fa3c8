"""Stop signals: SIGTERM and SIGINT ask once for a graceful stop, a second time for an immediate one.

Must not know: how a service stops.
"""

import asyncio
import signal


class StopSignals:
    """Counts stop signals of this process. Install inside the running event loop."""

    def __init__(self) -> None:
        self._graceful = asyncio.Event()
        self._immediate = asyncio.Event()

    def install(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._note)

    def _note(self) -> None:
        (self._immediate if self._graceful.is_set() else self._graceful).set()

    async def wait_graceful(self) -> None:
        """Returns at the first signal."""
        await self._graceful.wait()

    async def wait_immediate(self) -> None:
        """Returns at the second signal."""
        await self._immediate.wait()
