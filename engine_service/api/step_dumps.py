"""Fetches what the engine's step recorder holds, for one caller at a time.

Must not know: gRPC, the format of a trace, how steps are recorded.
"""

import asyncio
from collections.abc import Sequence

from engine_service.api.kv_feed import CommandSink
from engine_service.loop.messages import DumpSteps
from engine_service.loop.step_recorder import DumpPiece

TIMEOUT_SECONDS = 30.0


class StepDumps:
    """Lives on the event loop. The pieces come with the engine's reports."""

    def __init__(self) -> None:
        self._number = 0
        self._pieces: list[DumpPiece] | None = None
        self._is_gone = False
        self._changed = asyncio.Event()

    @property
    def is_busy(self) -> bool:
        return self._pieces is not None

    def tell(self, pieces: Sequence[DumpPiece]) -> None:
        """What a report brought. Nothing is kept when nobody waits for it."""
        if self._pieces is not None:
            self._pieces.extend(piece for piece in pieces if piece.number == self._number)
            self._changed.set()

    def engine_gone(self) -> None:
        """No piece will come any more."""
        self._is_gone = True
        self._changed.set()

    async def fetch(
        self, commands: CommandSink, last_steps: int | None, timeout_s: float = TIMEOUT_SECONDS
    ) -> list[DumpPiece] | None:
        """All pieces; None when the engine has gone. Raises TimeoutError for one that does not answer.

        Not while `is_busy`.
        """
        self._number += 1
        pieces: list[DumpPiece] = []
        self._pieces = pieces
        self._is_gone = False
        try:
            commands.send(DumpSteps(self._number, last_steps), always=True)
            async with asyncio.timeout(timeout_s):
                while not (pieces and pieces[-1].is_last):
                    if self._is_gone:
                        return None
                    self._changed.clear()
                    await self._changed.wait()
        finally:
            self._pieces = None
        return pieces
