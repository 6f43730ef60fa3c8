"""Asks engines what they do now: all at once, not more often than is useful, and never for long.

Must not know: who wants to know.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from tokenizer_service.engines.connection import EngineConnection
from tokenwire.engine.v1 import engine_pb2

TIMEOUT_SECONDS = 1.0
FRESH_SECONDS = 0.2
_MAX_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Answer:
    """`load` is None for an engine that did not answer; `error` then says why."""

    load: engine_pb2.GetLoadResponse | None
    error: str = ""


_NOT_CONNECTED = Answer(None, "not connected")


@dataclass(slots=True)
class FigureReader:
    """Answers of less than FRESH_SECONDS ago are given again: many who ask cost as much as one."""

    clock: Callable[[], float] = time.monotonic
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _answers: dict[str, Answer] = field(default_factory=dict)
    _asked: float = float("-inf")

    async def ask(self, connections: Sequence[EngineConnection]) -> dict[str, Answer]:
        """By address."""
        async with self._lock:
            known = self._answers.keys() >= {each.address for each in connections}
            if not known or self.clock() - self._asked > FRESH_SECONDS:
                self._answers = await _ask_all(connections)
                self._asked = self.clock()
            # What a lost engine said before is no answer.
            return {each.address: self._answers[each.address] if each.stub else _NOT_CONNECTED for each in connections}


async def _ask_all(connections: Sequence[EngineConnection]) -> dict[str, Answer]:
    places = asyncio.Semaphore(_MAX_AT_ONCE)

    async def ask(connection: EngineConnection) -> Answer:
        async with places:
            return await _ask(connection)

    answers = await asyncio.gather(*(ask(each) for each in connections))
    return {each.address: answer for each, answer in zip(connections, answers, strict=True)}


async def _ask(connection: EngineConnection) -> Answer:
    if connection.stub is None:
        return _NOT_CONNECTED
    try:
        return Answer(await connection.stub.GetLoad(engine_pb2.GetLoadRequest(), timeout=TIMEOUT_SECONDS))
    except grpc.aio.AioRpcError as error:
        return Answer(None, error.code().name.lower().replace("_", " "))
