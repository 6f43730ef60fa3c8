"""Asks one engine to load a LoRA adapter, or to forget one, and waits until its session tells the same.

Must not know: other engines, who asks.
"""

import asyncio
from collections.abc import Callable

import grpc

from tokenizer_service.engines.connection import EngineConnection
from tokenizer_service.engines.messages import AdapterInfo
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenwire.engine.v1 import engine_pb2

# So long the session may be behind the answer; requests are routed by what it tells.
_TOLD_SECONDS = 5.0
# What the services put into every status of their own; the transport's have none.
_OWN_STATUS = "grpc-status-details-bin"
_NOT_CONNECTED = Refusal(RefusalCode.UNAVAILABLE, "the engine is not connected any more")


async def load(connection: EngineConnection, name: str, timeout_s: float) -> Refusal | None:
    """None: requests may name it, and go to the engine. It lies in the engine's own folder."""
    stub, end = connection.stub, _now() + timeout_s
    if stub is None:
        return _NOT_CONNECTED
    try:
        answer = await stub.LoadAdapter(engine_pb2.LoadAdapterRequest(name=name), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return _refusal(error, timeout_s)
    wanted = answer.adapter.fingerprint
    await _until_told(connection, name, lambda adapter: adapter is not None and adapter.fingerprint == wanted, end)
    return None


async def unload(connection: EngineConnection, name: str, timeout_s: float) -> Refusal | None:
    """None: the name means nothing at the engine, and no request goes there for it."""
    stub, end = connection.stub, _now() + timeout_s
    if stub is None:
        return _NOT_CONNECTED
    try:
        await stub.UnloadAdapter(engine_pb2.UnloadAdapterRequest(name=name), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return _refusal(error, timeout_s)
    await _until_told(connection, name, lambda adapter: adapter is None, end)
    return None


async def _until_told(
    connection: EngineConnection, name: str, is_so: Callable[[AdapterInfo | None], bool], end: float
) -> None:
    """Also when the session ends, or another operator's word came later."""

    def is_over() -> bool:
        return connection.model is None or is_so(connection.model.adapters.get(name))

    await connection.adapters_changed.wait_for(is_over, min(_TOLD_SECONDS, max(0.0, end - _now())))


def _refusal(error: grpc.aio.AioRpcError, timeout_s: float) -> Refusal:
    code = RefusalCode(error.code().value[0])
    metadata = error.trailing_metadata() or ()
    if any(key == _OWN_STATUS for key, _ in metadata):
        return Refusal(code, error.details() or "")
    if code is RefusalCode.DEADLINE_EXCEEDED:
        return Refusal(code, f"the engine gave no answer within {timeout_s:.1f} s")
    if code is RefusalCode.UNAVAILABLE:
        return Refusal(code, "the engine cannot be reached")
    return Refusal(code, "the call to the engine failed")


def _now() -> float:
    return asyncio.get_running_loop().time()
