"""Asks the engine process to load and unload adapters, and waits for its answers.

Must not know: gRPC, where adapters lie.
"""

import asyncio
from collections.abc import Callable, Sequence

from engine_service.api.kv_feed import CommandSink
from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.loop.messages import LoadAdapter, UnloadAdapter

MAX_CALLS = 16
TIMEOUT_SECONDS = 60.0
_BUSY = Refusal(RefusalCode.QUEUE_FULL, f"{MAX_CALLS} calls about adapters wait already", retry_after_s=1.0)
_SILENT = Refusal(RefusalCode.ENGINE_GONE, "the engine does not answer", retry_after_s=1.0)


class AdapterCalls:
    """Lives on the event loop. The answers come with the engine's reports."""

    def __init__(self) -> None:
        self._ticket = 0
        self._pending: dict[int, asyncio.Future[Refusal | None]] = {}

    def tell(self, answers: Sequence[tuple[int, Refusal | None]]) -> None:
        for ticket, refusal in answers:
            future = self._pending.get(ticket)
            if future is not None and not future.done():
                future.set_result(refusal)

    def engine_gone(self, reason: Refusal) -> None:
        """No answer will come any more."""
        self.tell([(ticket, reason) for ticket in self._pending])

    async def load(self, commands: CommandSink, name: str, folder: str) -> Refusal | None:
        """None: the name means the adapter in the folder."""
        return await self._ask(commands, lambda ticket: LoadAdapter(ticket, name, folder))

    async def unload(self, commands: CommandSink, name: str) -> Refusal | None:
        return await self._ask(commands, lambda ticket: UnloadAdapter(ticket, name))

    async def _ask(self, commands: CommandSink, command: Callable[[int], object]) -> Refusal | None:
        if len(self._pending) >= MAX_CALLS:
            return _BUSY
        self._ticket += 1
        ticket = self._ticket
        future: asyncio.Future[Refusal | None] = asyncio.get_running_loop().create_future()
        self._pending[ticket] = future
        try:
            commands.send(command(ticket), always=True)
            return await asyncio.wait_for(future, TIMEOUT_SECONDS)
        except TimeoutError:
            return _SILENT
        finally:
            del self._pending[ticket]
