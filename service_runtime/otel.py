"""Spans recorded with OpenTelemetry and exported over OTLP/gRPC; the only module that imports the library.

Ended spans wait in a bounded queue for a thread of its own; what does not fit or cannot be exported is counted and
lost, never waited for. Must not know: requests, settings.
"""

import logging
import os
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import structlog
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, TraceState

from service_runtime.trace_context import TraceContext
from service_runtime.tracing import Anchor, Attributes, SpanKind

MAX_QUEUED_SPANS = 8192
EXPORT_INTERVAL_S = 1.0
EXPORT_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 3.0
"""How long a service that stops waits for its last spans to be taken."""

_MAX_EVENTS, _MAX_ATTRIBUTES, _MAX_VALUE_CHARACTERS = 64, 64, 1024
_KINDS = {
    SpanKind.SERVER: trace.SpanKind.SERVER,
    SpanKind.CLIENT: trace.SpanKind.CLIENT,
    SpanKind.INTERNAL: trace.SpanKind.INTERNAL,
}
# Every span says what it is under: one that some library has left current is not a request's.
_NOTHING = Context()
_log = structlog.get_logger()


class OtelTracer:
    """A Tracer. `endpoint` is http://HOST:PORT or, encrypted, https://HOST:PORT; headers, certificates and compression
    are the library's own OTEL_EXPORTER_OTLP_... variables. A request without a sampled caller is recorded with
    probability `sample_ratio`; one with a caller as the caller decided.
    """

    def __init__(self, *, endpoint: str, sample_ratio: float, service: str, version: str) -> None:
        # Our own lines say once what the library would say with each batch.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        instance = f"{socket.gethostname()}:{os.getpid()}"
        own = Resource({"service.name": service, "service.version": version, "service.instance.id": instance})
        self._exporter = _Exporter(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(sample_ratio)),
            resource=own.merge(OTELResourceDetector().detect()),
            shutdown_on_exit=False,
            span_limits=SpanLimits(
                max_span_attributes=_MAX_ATTRIBUTES,
                max_events=_MAX_EVENTS,
                max_attribute_length=_MAX_VALUE_CHARACTERS,
            ),
        )
        self._ended = _EndedSpans()
        self._provider.add_span_processor(self._ended)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=MAX_QUEUED_SPANS,
                schedule_delay_millis=EXPORT_INTERVAL_S * 1000,
                max_export_batch_size=512,
            )
        )
        self._tracer = self._provider.get_tracer("tokenwire", version)

    def begin(self, name: str, kind: SpanKind, parent: TraceContext | None, anchor: Anchor) -> "OtelSpan":
        caller = trace.INVALID_SPAN if parent is None else NonRecordingSpan(_span_context(parent))
        under = trace.set_span_in_context(caller, _NOTHING)
        span = self._tracer.start_span(name, under, _KINDS[kind], start_time=anchor.wall_ns)
        return OtelSpan(self._tracer, span, anchor)

    def close(self) -> None:
        """In a thread that nobody waits for longer than the time: the library itself may wait for ever."""
        closing = threading.Thread(target=self._provider.shutdown, name="trace-export-end", daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        lost = self._ended.count - self._exporter.num_exported
        if lost:
            _log.warning("trace_spans_lost", spans=lost, of=self._ended.count)


@dataclass(frozen=True, slots=True)
class OtelSpan:
    """A Span of the library's."""

    tracer: trace.Tracer
    span: trace.Span
    anchor: Anchor

    @property
    def is_recorded(self) -> bool:
        return self.span.is_recording()

    @property
    def context(self) -> TraceContext:
        context = self.span.get_span_context()
        state = context.trace_state.to_header() if context.trace_state else ""
        return TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", int(context.trace_flags), state)

    def child(self, name: str, at: float, kind: SpanKind = SpanKind.INTERNAL) -> "OtelSpan":
        under = trace.set_span_in_context(self.span, _NOTHING)
        span = self.tracer.start_span(name, under, _KINDS[kind], start_time=self.anchor.wall(at))
        return OtelSpan(self.tracer, span, self.anchor)

    def stage(self, name: str, began: float, ended: float, attributes: Attributes | None = None) -> None:
        if self.span.is_recording():
            self.child(name, began).end(ended, attributes)

    def event(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        if self.span.is_recording():
            self.span.add_event(name, _given(attributes), self.anchor.wall(at))

    def set(self, attributes: Attributes) -> None:
        self.span.set_attributes(_given(attributes))

    def end(
        self, at: float, attributes: Attributes | None = None, *, error: str | None = None, is_fault: bool = True
    ) -> None:
        if not self.span.is_recording():
            return
        self.span.set_attributes(_given(attributes))
        if error is not None:
            self.span.set_attribute("error.type", error)
            if is_fault:
                self.span.set_status(Status(StatusCode.ERROR, error))
        self.span.end(self.anchor.wall(at))


class _EndedSpans(SpanProcessor):
    """Counts what should be exported: the queue drops what does not fit without a word."""

    def __init__(self) -> None:
        self.count = 0

    def on_end(self, span: ReadableSpan) -> None:
        self.count += 1


class _Exporter(SpanExporter):
    """Another exporter, of which it is said once when it fails and once when it works again."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self._is_failing = False
        self.num_exported = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            result = self._inner.export(spans)
        except Exception as error:
            _log.debug("trace_export_raised", error=type(error).__name__)
            result = SpanExportResult.FAILURE
        is_failing = result is not SpanExportResult.SUCCESS
        self.num_exported += 0 if is_failing else len(spans)
        if is_failing != self._is_failing:
            self._is_failing = is_failing
            say = _log.warning if is_failing else _log.info
            say("trace_export_fails" if is_failing else "trace_export_works", spans=len(spans))
        return result

    def shutdown(self) -> None:
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._inner.force_flush(timeout_millis)


def _span_context(parent: TraceContext) -> SpanContext:
    state = TraceState.from_header([parent.state]) if parent.state else None
    return SpanContext(int(parent.trace_id, 16), int(parent.span_id, 16), True, TraceFlags(parent.flags), state)


def _given(attributes: Attributes | None) -> dict[str, Any]:
    return {} if attributes is None else {name: value for name, value in attributes.items() if value is not None}
