"""Finds out that the client of a session is gone though its connection is not: it breaks its promise to say something.

Must not know: grpc calls, what is done about it.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from engine_service.core.outcome import Refusal, RefusalCode
from tokenwire.engine.v1 import engine_pb2

MIN_HEARTBEAT_S, MAX_HEARTBEAT_S = 0.1, 3600.0
_MAX_MISSED = 3
_NANOS = 1_000_000_000


def read_heartbeat(message: engine_pb2.OpenSession) -> float | Refusal | None:
    """Seconds; None: the client promises nothing."""
    if not message.HasField("heartbeat"):
        return None
    seconds, nanos = message.heartbeat.seconds, message.heartbeat.nanos
    heartbeat_s = seconds + nanos / _NANOS
    if abs(nanos) >= _NANOS or not MIN_HEARTBEAT_S <= heartbeat_s <= MAX_HEARTBEAT_S:
        given = f"heartbeat of {seconds:,} s and {nanos:,} ns"
        text = f"{given} is not between {MIN_HEARTBEAT_S:g} and {MAX_HEARTBEAT_S:,.0f} s"
        return Refusal(RefusalCode.INVALID, text, "open.heartbeat")
    return heartbeat_s


class HeartbeatWatch:
    """Of one session. `heartbeat_s`: None waits for nothing. Costs an assignment per message and a timer per heartbeat.

    Heartbeats without a message are counted, not seconds: a pause of this process, in which nothing could be read, is
    one of them at most and so never held against the client.
    """

    def __init__(self, heartbeat_s: float | None) -> None:
        self._heartbeat_s = heartbeat_s
        self._has_heard = False
        self._is_paused = False

    @property
    def limit_s(self) -> float:
        """How long a client that promised heartbeats may be silent."""
        return _MAX_MISSED * (self._heartbeat_s or 0.0)

    def heard(self) -> None:
        """A message has come."""
        self._has_heard = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """While nothing is read, silence means nothing."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self.heard()

    async def wait_silent(self) -> Refusal:
        """Returns when nothing came for three heartbeats (at most four: they are not counted from the last message)."""
        if self._heartbeat_s is None:
            never: asyncio.Future[Refusal] = asyncio.get_running_loop().create_future()
            return await never
        missed = 0
        while missed < _MAX_MISSED:
            self._has_heard = False
            await asyncio.sleep(self._heartbeat_s)
            missed = 0 if self._has_heard or self._is_paused else missed + 1
        text = f"nothing came for {self.limit_s:g} s; the session promised a message every {self._heartbeat_s:g} s"
        return Refusal(RefusalCode.DEADLINE, text)
