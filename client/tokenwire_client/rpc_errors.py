"""From a gRPC status, with its details, to an exception of this library.

Must not know: which call failed, retries, googleapis packages.
"""

from collections.abc import Iterable

import grpc
from google.protobuf.message import DecodeError

from tokenwire.common.v1 import outcome_pb2
from tokenwire_client.errors import ErrorCode, FieldViolation, TokenwireError, error_for
from tokenwire_client.types import Usage

_DETAILS_KEY = "grpc-status-details-bin"


def translate(
    code: grpc.StatusCode, message: str | None, trailing: Iterable[tuple[str, str | bytes]] | None
) -> TokenwireError:
    """The exception for a failed call; `trailing` is its trailing metadata."""
    violations: list[FieldViolation] = []
    retry_after: float | None = None
    usage: Usage | None = None
    for detail in _details(trailing or ()):
        if detail.type_url.endswith("google.rpc.BadRequest"):
            violations += _violations(detail.value)
        elif detail.type_url.endswith("google.rpc.RetryInfo"):
            retry_after = _retry_after(detail.value)
        elif detail.type_url.endswith("tokenwire.common.v1.Usage"):
            usage = _usage(detail.value)
    text = message or code.name.lower().replace("_", " ")
    error = error_for(ErrorCode[code.name], text, retry_after, tuple(violations))
    error.usage = usage
    return error


def _details(trailing: Iterable[tuple[str, str | bytes]]) -> list[outcome_pb2.StatusDetail]:
    for key, value in trailing:
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                return list(outcome_pb2.StatusDetails.FromString(value).details)
            except DecodeError:
                # The status itself is still good.
                return []
    return []


def _violations(value: bytes) -> list[FieldViolation]:
    try:
        detail = outcome_pb2.BadRequestDetail.FromString(value)
    except DecodeError:
        return []
    return [FieldViolation(each.field, each.description) for each in detail.field_violations]


def _retry_after(value: bytes) -> float | None:
    try:
        delay = outcome_pb2.RetryInfoDetail.FromString(value).retry_delay
    except DecodeError:
        return None
    return max(0.0, delay.seconds + delay.nanos / 1e9)


def _usage(value: bytes) -> Usage | None:
    try:
        usage = outcome_pb2.Usage.FromString(value)
    except DecodeError:
        return None
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
