"""Which gRPC status each refusal becomes: the one place that says so.

Must not know: why a request was refused.
"""

from typing import Any, NoReturn

import grpc

from engine_service.core.outcome import Finish, FinishReason, Refusal, RefusalCode
from service_runtime import statuses
from service_runtime.wire import Malformed

_STATUS = {
    RefusalCode.INVALID: grpc.StatusCode.INVALID_ARGUMENT,
    RefusalCode.TOO_LARGE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalCode.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalCode.SLOW_READER: grpc.StatusCode.RESOURCE_EXHAUSTED,
    RefusalCode.CANCELLED: grpc.StatusCode.CANCELLED,
    RefusalCode.DEADLINE: grpc.StatusCode.DEADLINE_EXCEEDED,
    RefusalCode.TOO_LATE: grpc.StatusCode.DEADLINE_EXCEEDED,
    RefusalCode.SHUTTING_DOWN: grpc.StatusCode.UNAVAILABLE,
    RefusalCode.ENGINE_GONE: grpc.StatusCode.UNAVAILABLE,
    RefusalCode.DUPLICATE: grpc.StatusCode.ALREADY_EXISTS,
    RefusalCode.UNKNOWN_ADAPTER: grpc.StatusCode.NOT_FOUND,
    RefusalCode.FAILED: grpc.StatusCode.INTERNAL,
}

# Refused before any of it was computed: counted as rejected, not as failed.
_REJECTIONS = frozenset(
    {
        RefusalCode.INVALID,
        RefusalCode.TOO_LARGE,
        RefusalCode.QUEUE_FULL,
        RefusalCode.TOO_LATE,
        RefusalCode.DUPLICATE,
        RefusalCode.SHUTTING_DOWN,
        RefusalCode.UNKNOWN_ADAPTER,
    }
)


def grpc_status(code: RefusalCode) -> grpc.StatusCode:
    return _STATUS[code]


def outcome_of(finish: Finish) -> str:
    """`stop`, `length`, `abort`, `error` or `rejected`: how a request is counted."""
    error = finish.error
    if finish.reason is FinishReason.ERROR and error is not None and error.code in _REJECTIONS:
        return "rejected"
    return finish.reason.value


def malformed(message: Malformed) -> Refusal:
    """The refusal of a message that could not be read."""
    if not message.field:
        return Refusal(RefusalCode.INVALID, message.description)
    return Refusal(RefusalCode.INVALID, f"{message.field}: {message.description}", message.field)


async def abort(context: grpc.aio.ServicerContext[Any, Any], refusal: Refusal) -> NoReturn:
    """Ends the call with the refusal's status and its details (BadRequest, RetryInfo)."""
    violations = [(refusal.field, refusal.message)] if refusal.field else []
    await statuses.abort(
        context,
        grpc_status(refusal.code),
        refusal.message,
        field_violations=violations,
        retry_after_s=refusal.retry_after_s,
    )
