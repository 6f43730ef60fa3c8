"""The public names of the library: what `from tokenwire_client import ...` offers.

Must not know: the command line.
"""

from tokenwire_client.async_stream import AsyncStream
from tokenwire_client.client import AsyncClient
from tokenwire_client.errors import (
    Cancelled,
    DeadlineExceeded,
    ErrorCode,
    FieldViolation,
    IncompleteStream,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    TokenwireError,
    Unauthenticated,
    Unavailable,
)
from tokenwire_client.retry import NO_RETRIES, RetryPolicy
from tokenwire_client.sync import Client
from tokenwire_client.sync_stream import Stream
from tokenwire_client.types import (
    Completion,
    Delta,
    FinishReason,
    Health,
    HealthStatus,
    Message,
    Model,
    Sampling,
    Usage,
)

__all__ = [
    "NO_RETRIES",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "ErrorCode",
    "FieldViolation",
    "FinishReason",
    "Health",
    "HealthStatus",
    "IncompleteStream",
    "Internal",
    "InvalidRequest",
    "Message",
    "Model",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "RetryPolicy",
    "Sampling",
    "Stream",
    "TokenwireError",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
