"""Everything the client library raises on purpose.

Must not know: grpc, protobuf. The class says what to do about it, `code` says exactly what was answered.
"""

from dataclasses import dataclass
from enum import Enum

from tokenwire_client.types import Usage


class ErrorCode(Enum):
    """The canonical gRPC codes of failures, and INCOMPLETE_STREAM, which no server sends."""

    CANCELLED = "cancelled"
    UNKNOWN = "unknown"
    INVALID_ARGUMENT = "invalid_argument"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NOT_FOUND = "not_found"
    ALREADY_EXISTS = "already_exists"
    PERMISSION_DENIED = "permission_denied"
    RESOURCE_EXHAUSTED = "resource_exhausted"
    FAILED_PRECONDITION = "failed_precondition"
    ABORTED = "aborted"
    OUT_OF_RANGE = "out_of_range"
    UNIMPLEMENTED = "unimplemented"
    INTERNAL = "internal"
    UNAVAILABLE = "unavailable"
    DATA_LOSS = "data_loss"
    UNAUTHENTICATED = "unauthenticated"
    INCOMPLETE_STREAM = "incomplete_stream"


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """A field of the request that was refused, and why."""

    field: str
    description: str


class TokenwireError(Exception):
    """A call that did not succeed.

    `retry_after` is in seconds, set when the server says when a retry may succeed. `usage` is what the server had
    generated of the answer by then, all samples together; None when nothing was.
    """

    usage: Usage | None = None

    def __init__(
        self,
        code: ErrorCode,
        message: str,
        retry_after: float | None = None,
        field_violations: tuple[FieldViolation, ...] = (),
    ) -> None:
        # All of them go to `args`, so that the exception can be pickled.
        super().__init__(code, message, retry_after, field_violations)
        self.code = code
        self.message = message
        self.retry_after = retry_after
        self.field_violations = field_violations

    def __str__(self) -> str:
        return self.message


class InvalidRequest(TokenwireError):
    """The request itself is wrong; sending it again cannot help."""


class NotFound(TokenwireError):
    """The model or service of that name is not served here."""


class Overloaded(TokenwireError):
    """A limit was reached: a full queue, a slow reader, a message too large."""


class DeadlineExceeded(TokenwireError):
    """The timeout passed; the request was ended in the service."""


class Unavailable(TokenwireError):
    """No server, or none that can serve now."""


class Cancelled(TokenwireError):
    """The call was ended from outside: the stream was left, the client closed, or the server cancelled it."""


class Unauthenticated(TokenwireError):
    """The server wants credentials."""


class PermissionDenied(TokenwireError):
    """The credentials do not allow this."""


class Internal(TokenwireError):
    """The server failed, or answered something that the wire contract rules out."""


class IncompleteStream(TokenwireError):
    """The stream ended without its terminal message: what arrived is not a finished generation."""


_CLASS_OF: dict[ErrorCode, type[TokenwireError]] = {
    ErrorCode.INVALID_ARGUMENT: InvalidRequest,
    ErrorCode.OUT_OF_RANGE: InvalidRequest,
    ErrorCode.FAILED_PRECONDITION: InvalidRequest,
    ErrorCode.ALREADY_EXISTS: InvalidRequest,
    ErrorCode.NOT_FOUND: NotFound,
    ErrorCode.RESOURCE_EXHAUSTED: Overloaded,
    ErrorCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    ErrorCode.UNAVAILABLE: Unavailable,
    ErrorCode.CANCELLED: Cancelled,
    ErrorCode.UNAUTHENTICATED: Unauthenticated,
    ErrorCode.PERMISSION_DENIED: PermissionDenied,
    ErrorCode.INCOMPLETE_STREAM: IncompleteStream,
}


def error_for(
    code: ErrorCode,
    message: str,
    retry_after: float | None = None,
    field_violations: tuple[FieldViolation, ...] = (),
) -> TokenwireError:
    """The exception of that code; codes without a class of their own are `Internal`."""
    return _CLASS_OF.get(code, Internal)(code, message, retry_after, field_violations)


def invalid(field: str, description: str) -> InvalidRequest:
    """A mistake found before anything was sent."""
    violation = FieldViolation(field, description)
    return InvalidRequest(ErrorCode.INVALID_ARGUMENT, f"{field}: {description}", None, (violation,))
