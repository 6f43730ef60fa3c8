"""Traces from the client's side: which trace a request belongs to, and a span of its own where one is wanted.

OpenTelemetry is never imported here: an application with an active span has done so, and one that passes a tracer too.
Must not know: calls, what is asked for.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from tokenwire_client.errors import ErrorCode, TokenwireError, invalid
from tokenwire_client.types import Completion

_MAX_CHARACTERS = 512
_MODULE = "opentelemetry.trace"

Metadata = tuple[tuple[str, str], ...]


class Tracer(Protocol):
    """What is used of an `opentelemetry.trace.Tracer`."""

    def start_span(self, name: str, *, kind: Any = ..., attributes: Any = ...) -> Any: ...


class RequestTrace:
    """Of one request. `metadata` is what its calls carry; `end` may be called again, and then does nothing."""

    def __init__(self, metadata: Metadata, span: Any = None) -> None:
        self.metadata = metadata
        self._span = span

    def end(self, completions: Sequence[Completion], failure: TokenwireError | None) -> None:
        """At the end of the stream; without `completions` it did not end well."""
        span, self._span = self._span, None
        if span is None:
            return
        if completions:
            span.set_attributes(_facts(completions))
        else:
            code = ErrorCode.CANCELLED if failure is None else failure.code
            span.set_attribute("error.type", code.name)
            if code is not ErrorCode.CANCELLED:  # to leave is no fault
                span.set_status(sys.modules[_MODULE].Status(sys.modules[_MODULE].StatusCode.ERROR, code.name))
        span.end()

    @contextmanager
    def ending_with_failure(self) -> Iterator[None]:
        """Ends it if the block raises."""
        try:
            yield
        except TokenwireError as failure:
            self.end((), failure)
            raise


def trace_of(operation: str, model: str, tracer: Tracer | None, traceparent: str | None) -> RequestTrace:
    """With a tracer a span of our own, under the one that is current; else the given context, else the current one.

    Raises InvalidRequest for a `traceparent` that cannot go on the wire; its meaning is the service's to judge.
    """
    if traceparent is not None:
        _check(traceparent)
    if tracer is not None and traceparent is None:
        span = _new_span(tracer, operation, model)
        return RequestTrace(_metadata_of(span), span)
    return RequestTrace((("traceparent", traceparent),) if traceparent is not None else _current())


def _check(traceparent: str) -> None:
    if not isinstance(traceparent, str) or not traceparent.isascii() or not traceparent.isprintable():
        raise invalid("traceparent", "must be printable ASCII")
    if not 0 < len(traceparent) <= _MAX_CHARACTERS:
        raise invalid("traceparent", f"has {len(traceparent):,} characters; 1 to {_MAX_CHARACTERS} are allowed")


def _new_span(tracer: Tracer, operation: str, model: str) -> Any:
    facts = {"gen_ai.operation.name": operation, "gen_ai.provider.name": "tokenwire"}
    if model:
        facts["gen_ai.request.model"] = model
    kind = sys.modules[_MODULE].SpanKind.CLIENT
    return tracer.start_span(f"{operation} {model}".rstrip(), kind=kind, attributes=facts)


def _current() -> Metadata:
    module = sys.modules.get(_MODULE)
    return () if module is None else _metadata_of(module.get_current_span())


def _metadata_of(span: Any) -> Metadata:
    context = span.get_span_context()
    if not context.is_valid:
        return ()
    parent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"
    state = context.trace_state.to_header() if context.trace_state else ""
    return (("traceparent", parent), ("tracestate", state)) if state else (("traceparent", parent),)


def _facts(completions: Sequence[Completion]) -> dict[str, Any]:
    usage = completions[0].usage
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": sum(each.usage.completion_tokens for each in completions),
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": tuple(each.finish_reason.value for each in completions),
        "tokenwire.request_id": completions[0].request_id,
    }
