"""Ends a gRPC call with a status and its machine-readable details (google.rpc BadRequest, RetryInfo, QuotaFailure).

Must not know: why a request was refused.
"""

from collections.abc import Sequence
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status


def build_status(
    code: grpc.StatusCode,
    message: str,
    *,
    field_violations: Sequence[tuple[str, str]] = (),
    retry_after_s: float | None = None,
    quota: tuple[str, str] | None = None,
    more: Sequence[Message] = (),
) -> status_pb2.Status:
    """A google.rpc.Status with BadRequest (field, description), RetryInfo and QuotaFailure (subject, description)
    details where given, and `more` of them."""
    details: list[any_pb2.Any] = []
    if field_violations:
        bad = error_details_pb2.BadRequest()
        for field, description in field_violations:
            bad.field_violations.add(field=field, description=description)
        details.append(_pack(bad))
    if retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(retry_after_s * 1e9))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    if quota is not None:
        failure = error_details_pb2.QuotaFailure()
        failure.violations.add(subject=quota[0], description=quota[1])
        details.append(_pack(failure))
    details += [_pack(message) for message in more]
    return status_pb2.Status(code=code.value[0], message=message, details=details)


async def abort(
    context: "grpc.aio.ServicerContext[Any, Any]",
    code: grpc.StatusCode,
    message: str,
    *,
    field_violations: Sequence[tuple[str, str]] = (),
    retry_after_s: float | None = None,
    quota: tuple[str, str] | None = None,
    more: Sequence[Message] = (),
) -> NoReturn:
    """Ends the call of `context` with that status; never returns."""
    status = build_status(
        code, message, field_violations=field_violations, retry_after_s=retry_after_s, quota=quota, more=more
    )
    rich = rpc_status.to_status(status)
    await context.abort(rich.code, rich.details, rich.trailing_metadata)
    raise AssertionError("abort always raises")


def _pack(message: Message) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
