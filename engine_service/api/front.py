"""The front process's life: serve until a signal or the engine's death, then stop in order.

Must not know: what is served, how the engine runs.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

import grpc
import structlog

from engine_service.api.engine_handle import SHUTTING_DOWN, EngineHandle
from engine_service.api.supervisor import EngineSupervisor
from service_runtime.lifecycle import StopSignals

_LAST_STATUSES_SECONDS = 1.0
_ABORTED_SECONDS = 2.0


class Front:
    """Runs started servers around a supervised engine."""

    def __init__(
        self,
        *,
        servers: Sequence[grpc.aio.Server],
        set_serving: Callable[[bool], Awaitable[None]],
        handle: EngineHandle,
        supervisor: EngineSupervisor,
        signals: StopSignals,
        drain_timeout_s: float,
        watch: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`watch` runs beside the engine until the end."""
        self._servers = servers
        self._set_serving = set_serving
        self._handle = handle
        self._supervisor = supervisor
        self._signals = signals
        self._drain_timeout_s = drain_timeout_s
        self._watch = watch
        self._log = structlog.get_logger()

    async def run(self) -> str | None:
        """None after a stop that was asked for; otherwise why the engine is gone for good."""
        watch = None if self._watch is None else asyncio.create_task(self._watch())
        try:
            return await self._run()
        finally:
            if watch is not None:
                watch.cancel()

    async def _run(self) -> str | None:
        engine = asyncio.create_task(self._supervisor.run())
        stop = asyncio.create_task(self._signals.wait_graceful())
        await asyncio.wait({engine, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not stop.done():
            stop.cancel()
            await self._set_serving(False)
            await self._stop_servers(_LAST_STATUSES_SECONDS)
            return engine.result()
        is_immediate = await self._drain(engine, self._grace_s)
        await self._supervisor.stop(immediately=is_immediate)
        await self._stop_servers(0 if is_immediate else _LAST_STATUSES_SECONDS)
        await engine
        return None

    @property
    def _grace_s(self) -> float:
        asked_s = self._signals.grace_s
        return self._drain_timeout_s if asked_s is None else asked_s

    async def _drain(self, engine: asyncio.Task[str], grace_s: float) -> bool:
        """Lets running work finish in time; True when a second signal cut it short."""
        await self._set_serving(False)
        self._handle.drain()
        self._log.info("draining", live_requests=self._handle.num_live, timeout_s=grace_s)
        immediate = asyncio.create_task(self._signals.wait_immediate())
        await self._wait_idle(engine, immediate, grace_s)
        if self._handle.num_live and not immediate.done():
            self._log.warning("drain timeout", live_requests=self._handle.num_live)
            self._handle.cancel_all(SHUTTING_DOWN)
            await self._wait_idle(engine, immediate, _ABORTED_SECONDS)
        self._handle.detach(SHUTTING_DOWN)
        immediate.cancel()
        return immediate.done() and not immediate.cancelled()

    async def _stop_servers(self, grace_s: float) -> None:
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))

    async def _wait_idle(self, engine: asyncio.Task[str], immediate: asyncio.Task[None], timeout_s: float) -> None:
        idle = asyncio.create_task(self._handle.wait_idle())
        await asyncio.wait({engine, immediate, idle}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
