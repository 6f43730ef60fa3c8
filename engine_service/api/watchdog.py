"""Ends an engine that holds work and does not finish a step any more.

Must not know: how an engine is ended, what comes after it.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from engine_service.api.vitals import Vitals

_PATIENCE_SECONDS = 5.0


class Watchdog:
    """`end_engine` is told why. Costs one look at the clock in each `timeout_s` seconds."""

    def __init__(
        self,
        vitals: Vitals,
        *,
        timeout_s: float,
        set_serving: Callable[[bool], Awaitable[None]],
        end_engine: Callable[[str], Awaitable[None]],
    ) -> None:
        self._vitals = vitals
        self._timeout_s = timeout_s
        self._set_serving = set_serving
        self._end_engine = end_engine

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            left_s = self._timeout_s - self._vitals.stalled_s
            if left_s > 0:
                # Nothing can be due earlier, whatever happens meanwhile.
                await asyncio.sleep(left_s)
            elif await self._vitals.is_stuck(min(self._timeout_s, _PATIENCE_SECONDS)):
                await self._end()
            else:
                await asyncio.sleep(self._timeout_s / 4)

    async def _end(self) -> None:
        stalled_s = self._vitals.stalled_s
        reason = f"the engine hangs: it holds work and has finished no step for {stalled_s:,.1f} s"
        structlog.get_logger().error("engine hangs", seconds=round(stalled_s, 1), limit_s=self._timeout_s)
        await self._set_serving(False)
        await self._end_engine(reason)
