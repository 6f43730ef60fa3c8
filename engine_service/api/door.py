"""The one door for requests of both RPC styles: parse, hand to the engine, count and log what is refused.

Must not know: sessions, gRPC calls.
"""

import time
from collections.abc import Callable

import structlog

from engine_service.api.engine_handle import EngineHandle
from engine_service.api.engine_metrics import EngineMetrics
from engine_service.api.live_request import Submission, Wake
from engine_service.api.parse import parse_token_request
from engine_service.api.request_trace import RequestTrace, RequestTraces
from engine_service.core.outcome import Refusal
from service_runtime.trace_context import TraceContext
from service_runtime.tracing import NO_TRACER
from tokenwire.engine.v1 import engine_pb2


class Door:
    """`draw_seed` gives an int64, `draw_name` a request id nobody can guess. Without `traces` none is recorded."""

    def __init__(
        self,
        handle: EngineHandle,
        metrics: EngineMetrics,
        *,
        draw_seed: Callable[[], int],
        draw_name: Callable[[], str],
        traces: RequestTraces | None = None,
    ) -> None:
        self._traces = traces or RequestTraces(NO_TRACER, time.monotonic)
        self._handle = handle
        self._metrics = metrics
        self._draw_seed = draw_seed
        self._draw_name = draw_name

    def admit(
        self,
        message: engine_pb2.TokenRequest,
        *,
        call_timeout_s: float | None,
        wake: Wake,
        trace_of_call: TraceContext | None = None,
    ) -> Submission | Refusal:
        """A request that is now live in the engine, or why it is not."""
        trace = self._traces.begin(message, trace_of_call)
        admitted = self._try(message, call_timeout_s, wake, trace)
        if isinstance(admitted, Refusal):
            trace.refused(admitted, self._traces.clock())
            self._metrics.count_rejected(admitted)
            structlog.get_logger().info(
                "request rejected",
                request_id=message.request_id[:256],
                code=admitted.code.value,
                field=admitted.field,
                prompt_tokens=len(message.prompt_token_ids),
                **trace.log_fields,
            )
        return admitted

    def _try(
        self, message: engine_pb2.TokenRequest, call_timeout_s: float | None, wake: Wake, trace: RequestTrace
    ) -> Submission | Refusal:
        connection = self._handle.connection()
        if isinstance(connection, Refusal):
            return connection
        request = parse_token_request(
            message,
            connection.limits,
            call_timeout_s=call_timeout_s,
            draw_seed=self._draw_seed,
            draw_name=self._draw_name,
            defaults=connection.info.default_sampling,
        )
        return request if isinstance(request, Refusal) else self._handle.submit(request, wake, trace)
