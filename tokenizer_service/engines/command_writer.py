"""Writes the commands for one engine to its session, and something at least as often as was promised.

Must not know: what the engine answers, how the session is opened.
"""

import asyncio
import contextlib
from typing import TypeAlias

import grpc

from tokenizer_service.engines.request_table import RequestTable
from tokenwire.engine.v1 import engine_pb2

SessionCall: TypeAlias = "grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse]"


async def write_commands(call: SessionCall, requests: RequestTable, heartbeat_s: float | None) -> None:
    """The only writer of `call`. Ends quietly with it: the reader reports how it ended.

    `heartbeat_s`: after so long without a command a message without one is written; None: never.
    """
    loop = asyncio.get_running_loop()
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        while True:
            if not await _has_commands(requests, heartbeat_s):
                await call.write(engine_pb2.SessionRequest())
            requests.has_commands.clear()
            while commands := requests.next_commands(loop.time()):
                for command in commands:
                    await call.write(command)


async def _has_commands(requests: RequestTable, timeout_s: float | None) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            return await requests.has_commands.wait()
    except TimeoutError:
        return False
