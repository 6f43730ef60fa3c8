"""What a trace tells of one request at this engine: a span from its arrival to its end, and its stages.

The stages are timed by the engine process alone and told when a sample ends; here they become spans. Never token ids.
Must not know: gRPC calls, how spans are recorded.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from engine_service.api.errors import grpc_status
from engine_service.api.parse import MAX_NAME_CHARACTERS, MAX_TENANT_CHARACTERS
from engine_service.core.outcome import Finish, Refusal, RefusalCode
from engine_service.loop.messages import RequestTiming
from service_runtime.trace_context import TraceContext, read_context
from service_runtime.tracing import UNTRACED, Anchor, Attributes, Span, SpanKind, Tracer, trace_id_of
from tokenwire.engine.v1 import engine_pb2

MAX_TRACED_SAMPLES = 8
"""Of a request with more samples only the first have spans for their stages."""

# By convention the span of a server is no error where the client made a mistake, left, or may try again.
_NO_FAULTS = frozenset(
    {
        RefusalCode.INVALID,
        RefusalCode.TOO_LARGE,
        RefusalCode.QUEUE_FULL,
        RefusalCode.SLOW_READER,
        RefusalCode.CANCELLED,
        RefusalCode.DUPLICATE,
    }
)


@dataclass(frozen=True, slots=True)
class RequestTrace:
    """Of one submission. `anchor` is the moment of its arrival, on the front's clock. Only one that is recorded knows
    more than its span.
    """

    span: Span = UNTRACED
    anchor: Anchor = Anchor(0.0, 0)  # noqa: RUF009 (frozen)
    facts: Attributes = field(default_factory=dict)

    @property
    def log_fields(self) -> dict[str, str]:
        return trace_id_of(self.span)

    def sample_ended(self, index: int, finish: Finish, timing: RequestTiming | None) -> None:
        """Its stages, where the engine lived to tell them."""
        if timing is None or index >= MAX_TRACED_SAMPLES or not self.span.is_recorded:
            return
        began = self.anchor.reading(timing.arrived_ns)
        sample = {"tokenwire.sample": index} if index else {}
        for name, seconds, facts in _stages(finish, timing):
            if seconds is not None:
                self.span.stage(name, began, began + seconds, {**facts, **sample})
                began += seconds

    def refused(self, refusal: Refusal, now: float) -> None:
        """It never reached the engine process."""
        self._end({}, refusal, now)

    def ended(self, outcome: Finish, completion_tokens: int, now: float) -> None:
        """All samples have ended; `outcome` as in `Submission`, `completion_tokens` of all samples."""
        if not self.span.is_recorded:
            return
        facts: Attributes = {
            "gen_ai.usage.input_tokens": outcome.prompt_tokens,
            "gen_ai.usage.output_tokens": completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": outcome.cached_tokens,
            "gen_ai.response.finish_reasons": (outcome.reason.value,),
        }
        self._end(facts, outcome.error, now)

    def _end(self, facts: Attributes, error: Refusal | None, now: float) -> None:
        name = None if error is None else grpc_status(error.code).name
        is_fault = error is not None and error.code not in _NO_FAULTS
        self.span.end(now, {**self.facts, **facts}, error=name, is_fault=is_fault)


def _stages(finish: Finish, timing: RequestTiming) -> tuple[tuple[str, float | None, Attributes], ...]:
    prefill: Attributes = {
        "tokenwire.steps": timing.prefill_steps,
        "gen_ai.usage.input_tokens": finish.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": finish.cached_tokens,
    }
    decode: Attributes = {
        "tokenwire.steps": timing.decode_steps,
        "tokenwire.preemptions": timing.preemptions,
        "gen_ai.usage.output_tokens": finish.completion_tokens,
    }
    return ("queue", timing.queue_s, {}), ("prefill", timing.prefill_s, prefill), ("decode", timing.decode_s, decode)


@dataclass(frozen=True, slots=True)
class RequestTraces:
    """Begins them. `clock` is the front's, in seconds."""

    tracer: Tracer
    clock: Callable[[], float]
    model_name: str = ""

    def begin(self, message: engine_pb2.TokenRequest, of_call: TraceContext | None) -> RequestTrace:
        """Under the trace that the request names, or else the one that its call does."""
        named = read_context(message.trace.traceparent, message.trace.tracestate) if message.HasField("trace") else None
        anchor = Anchor.of(self.clock)
        span = self.tracer.begin("engine", SpanKind.SERVER, named or of_call, anchor)
        return RequestTrace(span, anchor, self._facts(message)) if span.is_recorded else RequestTrace(span)

    def _facts(self, message: engine_pb2.TokenRequest) -> Attributes:
        return {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "tokenwire",
            "gen_ai.request.model": self.model_name,
            "gen_ai.usage.input_tokens": len(message.prompt_token_ids),
            "tokenwire.request_id": message.request_id[:MAX_NAME_CHARACTERS] or None,
            "tokenwire.tenant": message.tenant[:MAX_TENANT_CHARACTERS] or None,
            "tokenwire.resumed_tokens": len(message.resumed_token_ids) or None,
        }


UNTRACED_REQUEST = RequestTrace()
