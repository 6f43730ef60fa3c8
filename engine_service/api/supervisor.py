"""Starts the engine process, passes its messages on, notices its death, and starts a fresh one if told to.

Must not know: gRPC calls, what the engine is built from.
"""

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from engine_service.api.engine_handle import EngineHandle
from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.loop.engine_process import Launched
from engine_service.loop.mailbox import FrontMailbox
from engine_service.loop.messages import EngineFatal, EngineReady, Shutdown, StartFailed, StepReport

_EXIT_SECONDS = 5.0
_STACK_DUMP_SECONDS = 2.0
_ENGINE_GONE = Refusal(RefusalCode.ENGINE_GONE, "the engine process ended unexpectedly", retry_after_s=1.0)

Launch = Callable[[], Awaitable[Launched]]
SetServing = Callable[[bool], Awaitable[None]]


class _Life:
    """One life of the engine process, as seen from here."""

    def __init__(self, launched: Launched, handle: EngineHandle) -> None:
        self.launched = launched
        self.mailbox = FrontMailbox(self._on_message, self._on_closed)
        self.is_ready = False
        self.is_over = False
        self.changed = asyncio.Event()
        self.over = asyncio.Event()
        self.last_word: str | None = None
        self._handle = handle

    def _on_message(self, message: object) -> None:
        match message:
            case StepReport():
                self._handle.on_report(message)
            case EngineReady():
                structlog.get_logger().info("engine ready", **_shown(message))
                self._handle.attach(message, self.mailbox)
                self.is_ready = True
                self.changed.set()
            case StartFailed() | EngineFatal():
                self.last_word = message.message
            case _:
                raise TypeError(f"not an engine message: {type(message).__name__}")

    def _on_closed(self) -> None:
        self.is_over = True
        self._handle.detach(_ENGINE_GONE)
        self.changed.set()
        self.over.set()


class EngineSupervisor:
    """`config` is what the engine process is sent first. `set_serving` tells the health service."""

    def __init__(
        self,
        *,
        launch: Launch,
        config: object,
        handle: EngineHandle,
        set_serving: SetServing,
        restart: bool,
    ) -> None:
        self._launch = launch
        self._config = config
        self._handle = handle
        self._set_serving = set_serving
        self._restart = restart
        self._is_stopping = False
        self._life: _Life | None = None
        self._log = structlog.get_logger()

    async def run(self) -> str:
        """Until the engine is gone for good; says why. A start that fails is never tried again."""
        while True:
            life = await self._live_once()
            message = life.last_word or "the engine process ended unexpectedly"
            if self._is_stopping or not (self._restart and life.is_ready):
                return message
            self._log.error("engine restarting", reason=message)

    async def stop(self, *, immediately: bool) -> None:
        """Ends the engine process; returns when it is gone."""
        self._is_stopping = True
        life = self._life
        if life is None:
            return
        # While the model loads nobody reads the mailbox.
        is_asked = life.is_ready and not immediately and life.mailbox.send(Shutdown(), always=True)
        if is_asked:
            await _exit_status(life.launched, _EXIT_SECONDS)
        life.launched.engine.kill()
        life.mailbox.close()

    async def end_hung(self, reason: str) -> None:
        """Kills an engine that is past being asked; `run` goes on as after any other death of it."""
        life = self._life
        if life is None or life.is_over:
            return
        life.last_word = reason
        life.launched.engine.dump_stacks()
        life.launched.engine.dump_steps()
        await asyncio.sleep(_STACK_DUMP_SECONDS)
        life.launched.engine.kill()
        await life.over.wait()

    async def _live_once(self) -> _Life:
        self._handle.launching()
        launched = await self._launch()
        life = self._life = _Life(launched, self._handle)
        await life.mailbox.connect(launched.front_end)
        if self._is_stopping:
            launched.engine.kill()
        life.mailbox.send(self._config, always=True)
        self._log.info("engine starting", engine_pid=launched.engine.pid)
        while not life.is_over:
            await life.changed.wait()
            life.changed.clear()
            if life.is_ready and not life.is_over and not self._handle.is_draining:
                await self._set_serving(True)
        await self._set_serving(False)
        await self._reap(life)
        return life

    async def _reap(self, life: _Life) -> None:
        launched = life.launched
        status = await _exit_status(launched, _EXIT_SECONDS)
        if status is None:
            launched.engine.kill()
            status = await launched.engine.wait()
        if self._is_stopping:
            self._log.info("engine stopped", status=status)
        else:
            self._log.error("engine gone", status=status, reason=life.last_word, was_ready=life.is_ready)


async def _exit_status(launched: Launched, timeout_s: float) -> int | None:
    try:
        return await asyncio.wait_for(launched.engine.wait(), timeout_s)
    except TimeoutError:
        return None


def _shown(ready: EngineReady) -> dict[str, object]:
    info = ready.info
    return {
        "engine_pid": info.pid,
        "epoch": info.epoch,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "vocab_size": info.vocab_size,
        "max_model_len": info.max_model_len,
        "block_size": info.block_size,
        "num_blocks": info.num_blocks,
    }
