"""The recorded spans: exported as they were made, and never waited for."""

import socket
import time

from benchmarks.serving.trace_collector import collector
from service_runtime.otel import CLOSE_TIMEOUT_S, OtelTracer
from service_runtime.trace_context import TraceContext
from service_runtime.tracing import Anchor, SpanKind

PARENT = TraceContext("4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7", 1, "a=1")
ANCHOR = Anchor(100.0, 1_700_000_000_000_000_000)


def tracer(endpoint: str, sample_ratio: float = 1.0) -> OtelTracer:
    return OtelTracer(endpoint=endpoint, sample_ratio=sample_ratio, service="test", version="1")


def test_spans_are_timed_by_the_anchors_clock_and_close_exports_them() -> None:
    with collector() as made:
        made_by = tracer(made.endpoint)
        span = made_by.begin("request", SpanKind.SERVER, PARENT, ANCHOR)
        assert (span.context.trace_id, span.context.state) == (PARENT.trace_id, "a=1")
        span.stage("first", 100.25, 100.5, {"a": 1, "none": None})
        span.event("said", 100.75)
        span.end(101.0, {"b": ("x",)}, error="INTERNAL")
        span.end(999.0, error="UNKNOWN")  # counts once
        made_by.close()
        stage, whole = made.spans
    assert (stage.name, stage.parent_id, stage.attributes) == ("first", whole.span_id, {"a": 1})
    assert (round(stage.began - 1.7e9, 3), round(stage.seconds, 3)) == (0.25, 0.25)
    assert (whole.parent_id, round(whole.seconds, 3), whole.kind) == (PARENT.span_id, 1.0, "server")
    assert (whole.is_error, whole.attributes) == (True, {"b": ["x"], "error.type": "INTERNAL"})
    assert whole.events == ("said",)


def test_what_is_not_sampled_is_passed_on_as_such() -> None:
    with collector() as made:
        made_by = tracer(made.endpoint, sample_ratio=0.0)
        alone = made_by.begin("request", SpanKind.SERVER, None, ANCHOR)
        called = made_by.begin("request", SpanKind.SERVER, PARENT, ANCHOR)
        assert (alone.is_recorded, alone.context.is_sampled) == (False, False)
        assert (called.is_recorded, called.context.is_sampled) == (True, True)
        for span in (alone.child("child", 100.5), alone, called):
            span.end(101.0)
        made_by.close()
        assert [span.trace_id for span in made.spans] == [PARENT.trace_id]


def test_a_collector_that_says_nothing_does_not_hold_up_the_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        made_by = tracer(f"http://127.0.0.1:{silent.getsockname()[1]}")
        made_by.begin("request", SpanKind.SERVER, None, ANCHOR).end(101.0)
        began = time.monotonic()
        made_by.close()
        assert time.monotonic() - began < CLOSE_TIMEOUT_S + 2
