"""What a DumpSteps call asks for, and the parts of its answer.

Must not know: how steps are recorded, the format of a trace.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc

from engine_service.api.engine_handle import Connection, EngineHandle
from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.loop.trace_events import Recording, trace_parts
from service_runtime import statuses
from tokenwire.engine.v1 import engine_pb2

_NO_STEPS = Refusal(RefusalCode.INVALID, "steps is 0, at least 1 is needed", "steps")
_BUSY = Refusal(RefusalCode.QUEUE_FULL, "another caller is given the recorded steps", retry_after_s=1.0)
_HANGS = Refusal(RefusalCode.ENGINE_GONE, "the engine does not answer", retry_after_s=1.0)


async def check_dump_allowed(context: "grpc.aio.ServicerContext[Any, Any]", is_allowed: bool) -> None:
    """Ends the call with PERMISSION_DENIED unless it is."""
    if not is_allowed:
        text = "recorded steps are not given out; this service was started without --allow-step-dump-rpc"
        await statuses.abort(context, grpc.StatusCode.PERMISSION_DENIED, text)


async def recorded_parts(
    handle: EngineHandle, connection: Connection, request: engine_pb2.DumpStepsRequest, clock: Callable[[], float]
) -> Iterator[str] | Refusal:
    """The file's text part by part. `clock` is the engine's too (monotonic seconds of this machine)."""
    last_steps = request.steps if request.HasField("steps") else None
    if last_steps == 0:
        return _NO_STEPS
    if handle.step_dumps.is_busy:
        return _BUSY
    taken_at, wall_time = clock(), time.time()
    try:
        pieces = await handle.step_dumps.fetch(connection.commands, last_steps)
    except TimeoutError:
        return _HANGS
    if pieces is None:
        return connection.reason
    steps = [step for piece in pieces for step in piece.steps]
    return trace_parts(Recording(steps, dict(pieces[-1].names), taken_at, wall_time))
