"""Whether requests are traced, and where the traces go.

Must not know: spans, the library that makes them.
"""

from dataclasses import dataclass
from typing import Annotated

from pydantic import StringConstraints

OtlpEndpoint = Annotated[str, StringConstraints(pattern=r"^https?://[^\s/@]+(:[0-9]{1,5})?/?$", max_length=512)]


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """`endpoint` None: traces are off. See `otel.OtelTracer`."""

    endpoint: str | None = None
    sample_ratio: float = 1.0


NO_TRACES = TraceOptions()
