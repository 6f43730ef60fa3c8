"""Why a request is not (any longer) served: a value that every layer of the service passes on.

Must not know: grpc, protobuf (`api/errors.py` turns it into a status).
"""

from dataclasses import dataclass
from enum import Enum


class RefusalCode(Enum):
    """The canonical status codes by number, so that an engine's code travels on unchanged."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


@dataclass(frozen=True, slots=True)
class Violation:
    """One field (a path as in the proto) and what is wrong with it, with the numbers."""

    field: str
    description: str


@dataclass(frozen=True, slots=True)
class QuotaBreach:
    """Whose limit, which one, and the numbers."""

    subject: str
    limit: str
    description: str


@dataclass(frozen=True, slots=True)
class Refusal:
    """Words for the client: numbers yes; paths, class names and tracebacks no."""

    code: RefusalCode
    message: str
    violations: tuple[Violation, ...] = ()
    retry_after_s: float | None = None
    quota: QuotaBreach | None = None


def invalid(violations: tuple[Violation, ...]) -> Refusal:
    """A client's mistake; the message is the first violation and how many more there are."""
    first = violations[0]
    more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
    return Refusal(RefusalCode.INVALID_ARGUMENT, f"{first.field}: {first.description}{more}", violations)


def invalid_field(field: str, description: str) -> Refusal:
    return invalid((Violation(field, description),))


def deadline_passed() -> Refusal:
    return Refusal(RefusalCode.DEADLINE_EXCEEDED, "the deadline of the call has passed")
