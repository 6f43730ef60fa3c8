"""What both services' Drain calls have in common: who may, and how long running work gets.

Must not know: what is drained.
"""

from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration

from service_runtime import statuses

MAX_GRACE_S = 86_400
_NANOS = 1_000_000_000


async def check_allowed(context: "grpc.aio.ServicerContext[Any, Any]", is_allowed: bool) -> None:
    """Ends the call with PERMISSION_DENIED unless it is."""
    if not is_allowed:
        text = "this service is not to be drained by a call; it was started without --allow-drain-rpc"
        await statuses.abort(context, grpc.StatusCode.PERMISSION_DENIED, text)


async def read_grace(context: "grpc.aio.ServicerContext[Any, Any]", grace: Duration, is_given: bool) -> float | None:
    """Seconds; None: the service's own setting. Ends the call with INVALID_ARGUMENT for a senseless one."""
    if not is_given:
        return None
    seconds = grace.seconds + grace.nanos / _NANOS
    if abs(grace.nanos) >= _NANOS or not 0 <= seconds <= MAX_GRACE_S:
        text = f"grace of {grace.seconds:,} s and {grace.nanos:,} ns is not between 0 and {MAX_GRACE_S:,} s"
        violation = ("grace", text)
        await statuses.abort(context, grpc.StatusCode.INVALID_ARGUMENT, text, field_violations=[violation])
    return seconds
