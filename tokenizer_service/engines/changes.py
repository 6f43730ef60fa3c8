"""Tells those who wait that something has changed, so that they look again.

Must not know: what it is.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Changes:
    """Lives on the event loop."""

    _waiting: set[asyncio.Event] = field(default_factory=set)

    def tell(self) -> None:
        for event in self._waiting:
            event.set()

    async def wait_for(self, is_so: Callable[[], bool], timeout_s: float) -> bool:
        """Until it is so, which is looked at after each change; whether it is."""
        event = asyncio.Event()
        self._waiting.add(event)
        try:
            async with asyncio.timeout(timeout_s):
                while not is_so():
                    event.clear()
                    await event.wait()
        except TimeoutError:
            return False
        finally:
            self._waiting.remove(event)
        return True
