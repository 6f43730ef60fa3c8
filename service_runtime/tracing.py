"""Spans as the services make them, whether or not somebody records them.

Off, a span only passes on the trace that the caller sent; the library is not even imported (`otel` is the only module
that does). Times are seconds of a monotonic clock; an Anchor makes wall time of them, so that each duration is taken
by one clock in one process. Must not know: requests, exporters.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

from service_runtime.trace_context import TraceContext
from service_runtime.trace_options import TraceOptions

Value: TypeAlias = str | bool | int | float | Sequence[str]
Attributes: TypeAlias = Mapping[str, Value | None]
"""None is no attribute."""


class SpanKind(Enum):
    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Anchor:
    """One moment on two clocks: `monotonic_s` of the clock that spans are timed with, `wall_ns` since 1970."""

    monotonic_s: float
    wall_ns: int

    @classmethod
    def of(cls, clock: Callable[[], float]) -> "Anchor":
        return cls(clock(), time.time_ns())

    def wall(self, at: float) -> int:
        """Nanoseconds since 1970 of a reading of the clock."""
        return self.wall_ns + round((at - self.monotonic_s) * 1e9)

    def reading(self, wall_ns: int) -> float:
        """The reading of the clock at a wall time, say one that another process has told."""
        return self.monotonic_s + (wall_ns - self.wall_ns) / 1e9


class Span(Protocol):
    """An operation in progress. `end` counts once; what is done after it is ignored.

    `error` is the type of a failure (a status code's name); `is_fault`: whether the span's status is an error, which
    by convention a server's span does not have for a client's mistake.
    """

    @property
    def is_recorded(self) -> bool: ...

    @property
    def context(self) -> TraceContext | None:
        """What whoever is called is told; None when nobody traces."""
        ...

    def child(self, name: str, at: float, kind: SpanKind = SpanKind.INTERNAL) -> "Span": ...

    def stage(self, name: str, began: float, ended: float, attributes: Attributes | None = None) -> None:
        """A child that is over."""

    def event(self, name: str, at: float, attributes: Attributes | None = None) -> None: ...

    def set(self, attributes: Attributes) -> None: ...

    def end(
        self, at: float, attributes: Attributes | None = None, *, error: str | None = None, is_fault: bool = True
    ) -> None: ...


class Tracer(Protocol):
    """Begins the spans of requests. `close` exports what is left, for a bounded time."""

    def begin(self, name: str, kind: SpanKind, parent: TraceContext | None, anchor: Anchor) -> Span:
        """A span that begins at the anchor; its children are timed with the anchor's clock."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Untraced:
    """A Span that records nothing and passes the caller's context on."""

    context: TraceContext | None = None

    @property
    def is_recorded(self) -> bool:
        return False

    def child(self, name: str, at: float, kind: SpanKind = SpanKind.INTERNAL) -> "Untraced":
        return self

    def stage(self, name: str, began: float, ended: float, attributes: Attributes | None = None) -> None:
        return

    def event(self, name: str, at: float, attributes: Attributes | None = None) -> None:
        return

    def set(self, attributes: Attributes) -> None:
        return

    def end(
        self, at: float, attributes: Attributes | None = None, *, error: str | None = None, is_fault: bool = True
    ) -> None:
        return


UNTRACED = Untraced()


@dataclass(frozen=True, slots=True)
class NoTracer:
    """Where traces are off."""

    def begin(self, name: str, kind: SpanKind, parent: TraceContext | None, anchor: Anchor) -> Untraced:
        return UNTRACED if parent is None else Untraced(parent)

    def close(self) -> None:
        return


NO_TRACER = NoTracer()


class TracingExtraMissing(Exception):
    """The packages that traces need are not installed."""


def start_tracer(options: TraceOptions, *, service: str, version: str) -> Tracer:
    """The library is imported only here, and only when it is used. Raises TracingExtraMissing."""
    if options.endpoint is None:
        return NO_TRACER
    try:
        from service_runtime.otel import OtelTracer
    except ModuleNotFoundError as error:
        raise TracingExtraMissing(
            f"--otlp-endpoint needs the package {error.name}: install tokenwire[tracing]"
        ) from error
    return OtelTracer(endpoint=options.endpoint, sample_ratio=options.sample_ratio, service=service, version=version)


def trace_id_of(span: Span) -> dict[str, str]:
    """The field of a log line; nothing where no trace is known."""
    context = span.context
    return {} if context is None else {"trace_id": context.trace_id}
