"""The first exchange of a session.

Must not know: what sessions are for, how an engine is reached.
"""

import asyncio
import contextlib

from google.protobuf.duration_pb2 import Duration

from tokenizer_service.engines.command_writer import SessionCall
from tokenwire.engine.v1 import engine_pb2


async def open_session(
    call: SessionCall, client_name: str, heartbeat_s: float, timeout_s: float
) -> engine_pb2.SessionOpened:
    """Raises TimeoutError when the engine does not answer, AioRpcError when it refuses."""
    async with asyncio.timeout(timeout_s):
        heartbeat = Duration()
        heartbeat.FromNanoseconds(round(heartbeat_s * 1e9))
        opening = engine_pb2.OpenSession(client_name=client_name, tell_load=True, heartbeat=heartbeat)
        with contextlib.suppress(asyncio.InvalidStateError):  # the read tells why the call has ended
            await call.write(engine_pb2.SessionRequest(open=opening))
        answer = await call.read()
    if not isinstance(answer, engine_pb2.SessionResponse) or not answer.HasField("opened"):
        raise TimeoutError("the engine ended the session without opening it")
    return answer.opened
