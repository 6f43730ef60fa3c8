"""What a trace tells of one call: its span with counts, settings and outcome; never text.

Names follow OpenTelemetry's semantic conventions for generative AI, and `tokenwire.` where they have none. Must not
know: how spans are recorded, how a call is served.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from service_runtime.trace_context import TraceContext
from service_runtime.tracing import NO_TRACER, Anchor, Attributes, Span, SpanKind, Tracer
from tokenizer_service.engines.messages import SamplingOptions, Usage
from tokenizer_service.engines.refusal import RefusalCode
from tokenizer_service.sessions.assembler import Assembled, Assembler

_OPERATIONS = {
    "Chat": "chat",
    "HttpChat": "chat",
    "HttpResponses": "chat",
    "Generate": "text_completion",
    "HttpCompletions": "text_completion",
}
# By convention the span of a server is no error for a client's mistake, its leaving, or a limit that it meets.
_FAULTS = frozenset(
    code.name
    for code in (
        RefusalCode.UNKNOWN,
        RefusalCode.DEADLINE_EXCEEDED,
        RefusalCode.INTERNAL,
        RefusalCode.UNAVAILABLE,
        RefusalCode.DATA_LOSS,
    )
)


@dataclass(frozen=True, slots=True)
class CallTraces:
    """Begins the spans of calls to the model of that name."""

    tracer: Tracer = NO_TRACER
    model_name: str = ""

    def begin(self, method: str, kind: SpanKind, parent: TraceContext | None, anchor: Anchor) -> Span:
        operation = _OPERATIONS.get(method)
        name = method if operation is None else f"{operation} {self.model_name}"
        span = self.tracer.begin(name, kind, parent, anchor)
        if span.is_recorded:
            span.set(self._facts(method, operation))
        return span

    def _facts(self, method: str, operation: str | None) -> Attributes:
        if operation is None:
            return {"tokenwire.method": method}
        return {
            "tokenwire.method": method,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "tokenwire",
            "gen_ai.request.model": self.model_name,
            "gen_ai.response.model": self.model_name,
        }


NO_CALL_TRACES = CallTraces()


def end_call(span: Span, code: str, now: float, facts: Attributes) -> None:
    """`code`: the name of the status that the client got."""
    span.end(now, facts, error=None if code == "OK" else code, is_fault=code in _FAULTS)


def sampling_facts(sampling: SamplingOptions) -> Attributes:
    """What the client has set."""
    return {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.top_k": sampling.top_k,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "gen_ai.request.seed": sampling.seed,
        "gen_ai.request.choice.count": sampling.n,
        "gen_ai.output.type": None if sampling.structured_output is None else "json",
    }


def usage_facts(usage: Usage, reasons: Sequence[str]) -> Attributes:
    """`reasons`: why each sample ended."""
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": tuple(reasons) or None,
    }


class TimedAssembler:
    """Another Assembler, and the seconds that it has taken."""

    def __init__(self, inner: Assembler) -> None:
        self._inner = inner
        self.seconds = 0.0

    def add(self, token_ids: Sequence[int]) -> Assembled:
        began = time.perf_counter()
        made = self._inner.add(token_ids)
        self.seconds += time.perf_counter() - began
        return made

    def finish(self) -> Assembled:
        began = time.perf_counter()
        made = self._inner.finish()
        self.seconds += time.perf_counter() - began
        return made
