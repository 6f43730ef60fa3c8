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
from tokenwire_client.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, StructuredOutput
from tokenwire_client.sync import Client
from tokenwire_client.sync_stream import Stream
from tokenwire_client.tls import Tls
from tokenwire_client.tools import NamedTool, Tool, ToolCall, ToolCallDelta, ToolChoice, ToolMode
from tokenwire_client.types import (
    Completion,
    Delta,
    FinishReason,
    Health,
    HealthStatus,
    Message,
    Model,
    PositionLogprobs,
    Sampling,
    TokenLogprob,
    Usage,
)

__all__ = [
    "NO_RETRIES",
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Choice",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "ErrorCode",
    "FieldViolation",
    "FinishReason",
    "Grammar",
    "Health",
    "HealthStatus",
    "IncompleteStream",
    "Internal",
    "InvalidRequest",
    "JsonObject",
    "JsonSchema",
    "Message",
    "Model",
    "NamedTool",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "PositionLogprobs",
    "Regex",
    "RetryPolicy",
    "Sampling",
    "Stream",
    "StructuredOutput",
    "Tls",
    "TokenLogprob",
    "TokenwireError",
    "Tool",
    "ToolCall",
    "ToolCallDelta",
    "ToolChoice",
    "ToolMode",
    "Unauthenticated",
    "Unavailable",
    "Usage",
]
