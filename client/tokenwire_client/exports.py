"""The public names of the library: what `from tokenwire_client import ...` offers.

Must not know: the command line.
"""

from tokenwire_client.async_stream import AsyncStream
from tokenwire_client.client import AsyncClient
from tokenwire_client.errors import (
    Cancelled,
    DeadlineExceeded,
    IncompleteStream,
    Internal,
    InvalidRequest,
    NotFound,
    Overloaded,
    TokenwireError,
    Unavailable,
)
from tokenwire_client.retry import RetryPolicy
from tokenwire_client.sync import Client
from tokenwire_client.sync_stream import Stream
from tokenwire_client.types import Completion, Delta, FinishReason, Health, Message, Model, Sampling, Usage

__all__ = [
    "AsyncClient",
    "AsyncStream",
    "Cancelled",
    "Client",
    "Completion",
    "DeadlineExceeded",
    "Delta",
    "FinishReason",
    "Health",
    "IncompleteStream",
    "Internal",
    "InvalidRequest",
    "Message",
    "Model",
    "NotFound",
    "Overloaded",
    "RetryPolicy",
    "Sampling",
    "Stream",
    "TokenwireError",
    "Unavailable",
    "Usage",
]
