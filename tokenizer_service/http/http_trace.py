"""The span of one HTTP request, from its headers to the last byte of the answer.

Must not know: what is asked for, how spans are recorded.
"""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from service_runtime.trace_context import TRACEPARENT, TRACESTATE, context_of_headers
from service_runtime.tracing import Anchor, Span, SpanKind, Tracer, Value
from tokenizer_service.http.exchange import TRACE, Scope, Send

CLIENT_GONE = "client_gone"
"""Error type of an answer that was not sent to its end."""

_NAMES = {name.encode(): name for name in (TRACEPARENT, TRACESTATE)}


@dataclass(slots=True)
class HttpTrace:
    """Watches what is sent. `status` is None until the answer has begun."""

    span: Span
    status: int | None = None
    is_whole: bool = False

    @classmethod
    def begin(cls, tracer: Tracer, scope: Scope, route: str, anchor: Anchor) -> "HttpTrace":
        """Notes in the scope what the request's work is a part of."""
        headers = [(_NAMES[name], value.decode("latin-1")) for name, value in scope["headers"] if name in _NAMES]
        span = tracer.begin(f"POST {route}", SpanKind.SERVER, context_of_headers(headers), anchor)
        if span.is_recorded:
            span.set({"http.request.method": "POST", "http.route": route})
        scope[TRACE] = span.context
        return cls(span)

    def watching(self, send: Send) -> Send:
        if not self.span.is_recorded:
            return send

        async def watched(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                self.status = message["status"]
            await send(message)
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self.is_whole = True

        return watched

    def end(self, now: float) -> None:
        """However the request ended."""
        facts: dict[str, Value | None] = {"http.response.status_code": self.status}
        if not self.is_whole:
            self.span.end(now, facts, error=CLIENT_GONE, is_fault=False)
        elif self.status is not None and self.status >= 500:
            self.span.end(now, facts, error=str(self.status))
        else:
            self.span.end(now, facts)
