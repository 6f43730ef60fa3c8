"""Follows which blocks one engine can reuse, while a session with it is open.

Must not know: how requests are routed, sessions.
"""

import asyncio
from collections.abc import Iterator
from enum import Enum, auto

import grpc
import structlog

from tokenizer_service.engines.block_digests import DIGEST_BYTES
from tokenizer_service.engines.messages import ModelInfo
from tokenizer_service.engines.prefix_map import Holder
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

RETRY_S = 1.0

_log = structlog.get_logger()


class _End(Enum):
    """How a watch ended."""

    AGAIN = auto()
    NEVER = auto()


async def watch_blocks(
    stub: "engine_pb2_grpc.EngineServiceAsyncStub", model: ModelInfo, blocks: Holder, address: str
) -> None:
    """Until cancelled, or for good when the engine tells nothing. What it held is forgotten at the end."""
    if model.block_size < 1:
        return
    try:
        while await _watch(stub, model, blocks, address) is _End.AGAIN:
            blocks.clear()
            await asyncio.sleep(RETRY_S)
    except Exception:
        # Routing is the poorer for it; the session must not be.
        _log.exception("kv_watch_failed", engine=address)
    finally:
        blocks.clear()


async def _watch(
    stub: "engine_pb2_grpc.EngineServiceAsyncStub", model: ModelInfo, blocks: Holder, address: str
) -> _End:
    call = stub.WatchKvEvents(engine_pb2.WatchKvEventsRequest())
    expected = 1
    try:
        async for message in call:
            if message.sequence_number != expected or message.engine_epoch != model.engine_epoch:
                _log.warning(
                    "kv_watch_gap",
                    engine=address,
                    expected=expected,
                    got=message.sequence_number,
                    same_epoch=message.engine_epoch == model.engine_epoch,
                )
                return _End.AGAIN
            expected += 1
            apply_changes(message, blocks)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return _End.NEVER
        _log.debug("kv_watch_ended", engine=address, code=error.code().name)
    finally:
        call.cancel()
    return _End.AGAIN


def apply_changes(message: engine_pb2.WatchKvEventsResponse, blocks: Holder) -> None:
    """Carries out one message's changes, in order."""
    for change in message.changes:
        match change.WhichOneof("change"):
            case "cleared":
                blocks.clear()
            case "stored":
                blocks.store(_digests(change.stored))
            case "removed":
                blocks.remove(_digests(change.removed))


def _digests(joined: bytes) -> Iterator[bytes]:
    return (joined[place : place + DIGEST_BYTES] for place in range(0, len(joined), DIGEST_BYTES))
