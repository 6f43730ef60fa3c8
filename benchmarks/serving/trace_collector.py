"""A collector of traces: a gRPC server that takes OTLP as any collector does, and keeps what it got.

Must not know: who sends what.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2

WAIT_S = 30.0


@dataclass(frozen=True, slots=True)
class Seen:
    """One span. Times in seconds since 1970; `error` is its status."""

    service: str
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: str
    began: float
    ended: float
    is_error: bool
    attributes: dict[str, Any]
    events: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.ended - self.began


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """`headers`: the metadata of the last export."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.resources: list[dict[str, Any]] = []
        self.headers: dict[str, str] = {}
        self.address = ""
        self._changed = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        with self._changed:
            self.headers = dict(context.invocation_metadata())
            for group in request.resource_spans:
                resource = _values(group.resource.attributes)
                self.resources.append(resource)
                for scope in group.scope_spans:
                    self.spans += [_seen(resource["service.name"], span) for span in scope.spans]
            self._changed.notify_all()
        return service_pb2.ExportTraceServiceResponse()

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}"

    def of_trace(self, trace_id: str) -> list[Seen]:
        return [span for span in self.spans if span.trace_id == trace_id]

    def wait(self, is_enough: Callable[[Sequence[Seen]], bool]) -> list[Seen]:
        """The spans, once they are enough."""
        deadline = time.monotonic() + WAIT_S
        with self._changed:
            while not is_enough(self.spans):
                left = deadline - time.monotonic()
                assert left > 0, "\n".join(f"{s.service} {s.name} {s.attributes}" for s in self.spans)
                self._changed.wait(left)
            return list(self.spans)

    def wait_trace(self, trace_id: str, *names: str) -> "Tree":
        """The trace, once it has spans of these names (so many of each as are named)."""

        def is_enough(spans: Sequence[Seen]) -> bool:
            found = [span.name for span in spans if span.trace_id == trace_id]
            return all(found.count(name) >= names.count(name) for name in names)

        self.wait(is_enough)
        return Tree(self.of_trace(trace_id))


@dataclass(frozen=True, slots=True)
class Tree:
    """The spans of one trace."""

    spans: list[Seen]

    def named(self, name: str) -> Seen:
        (found,) = self.all_named(name)
        return found

    def all_named(self, name: str) -> list[Seen]:
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.began)

    def children(self, parent: Seen) -> list[str]:
        """Names, in the order of their beginnings."""
        found = [span for span in self.spans if span.parent_id == parent.span_id]
        return [span.name for span in sorted(found, key=lambda span: span.began)]

    def parent(self, span: Seen) -> Seen | None:
        return next((other for other in self.spans if other.span_id == span.parent_id), None)


@contextmanager
def collector(port: int = 0) -> Iterator[Collector]:
    server = grpc.server(ThreadPoolExecutor(2))
    made = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(made, server)  # type: ignore[no-untyped-call]
    made.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    server.start()
    try:
        yield made
    finally:
        server.stop(None)


def _seen(service: str, span: trace_pb2.Span) -> Seen:
    return Seen(
        service,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.name,
        trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
        _values(span.attributes),
        tuple(event.name for event in span.events),
    )


def _values(attributes: Sequence[KeyValue]) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)
