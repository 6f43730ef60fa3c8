"""Metrics of generations: how long each part took, how large they were, how they ended.

Must not know: how requests are served, transports.
"""

from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from service_runtime.metrics import Deferred, powers_of_two, seconds_buckets
from tokenizer_service.engines.losses import is_full
from tokenizer_service.engines.messages import FinishReason
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.sessions.events import Completed

PREFIX = "tokenwire_tokenizer_"
_LATENCY_S = (*seconds_buckets(0.005, 10.0), 30.0, 60.0, 120.0, 300.0)
_SHORT_S = seconds_buckets(0.001, 5.0)
_TINY_S = (*seconds_buckets(0.0001, 1.0), 5.0)
_TOKENS, _SAMPLES = powers_of_two(131_072), powers_of_two(128)
_REASONS = ("stop", "stop_string", "length", "tool_calls")
_REJECTIONS = {
    RefusalCode.INVALID_ARGUMENT: "invalid",
    RefusalCode.NOT_FOUND: "unknown_model",
    RefusalCode.ALREADY_EXISTS: "duplicate",
    RefusalCode.UNAUTHENTICATED: "unauthenticated",
    RefusalCode.RESOURCE_EXHAUSTED: "overloaded",
    RefusalCode.UNAVAILABLE: "unavailable",
}


class FirstToken(NamedTuple):
    """Seconds from the arrival of its request."""

    seconds: float
    trace_id: str


@dataclass(frozen=True, slots=True)
class EndedGeneration:
    """One that an engine has taken. `max_tokens` None: none was set. Times in seconds."""

    seconds: float
    first_token_s: float | None
    last_token_s: float | None
    prompt_tokens: int
    generated_tokens: int
    max_tokens: int | None
    samples: int
    is_good: bool
    trace_id: str = ""

    @property
    def seconds_per_token(self) -> float | None:
        """After the first one, of a good answer; samples are generated side by side."""
        later = self.generated_tokens / self.samples - 1
        if not self.is_good or self.first_token_s is None or self.last_token_s is None or later <= 0:
            return None
        return (self.last_token_s - self.first_token_s) / later


def rejection(refusal: Refusal, *, was_taken: bool) -> str | None:
    """Why a request was turned away before any work was done for it; None when it was not.

    `was_taken`: an engine had it, so that only its full queue is a rejection.
    """
    if refusal.quota is not None:
        return "tenant_limit"
    if was_taken:
        return "overloaded" if is_full(refusal) else None
    return _REJECTIONS.get(refusal.code)


class GenerationMetrics:
    """What is told once a token or a request waits for the next reader of the metrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._gaps: Deferred[float] = Deferred(registry, self._observe_gaps)
        self._firsts: Deferred[FirstToken] = Deferred(registry, self._observe_firsts)
        self._ends: Deferred[EndedGeneration] = Deferred(registry, self._observe_ends)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, registry=registry, buckets=buckets)

        def counter(name: str, text: str) -> Counter:
            return Counter(PREFIX + name, text, registry=registry)

        self._first_token = histogram(
            "time_to_first_token_seconds", "From a generation's arrival to its first token.", _LATENCY_S
        )
        self._gap = histogram(
            "inter_token_latency_seconds", "Between two arrivals of tokens, per token of the later.", _SHORT_S
        )
        self._per_token = histogram(
            "time_per_output_token_seconds",
            "From the first token of a good generation to its last, per token after the first.",
            _SHORT_S,
        )
        self._request = histogram("request_seconds", "From a generation's arrival to its end.", _LATENCY_S)
        self.validation = histogram(
            "validation_seconds",
            "From a generation's arrival until an engine has it: checks, template, encoding, choice of the engine.",
            _TINY_S,
        )
        self.encode = histogram(
            "encode_seconds", "Template and encoding of a prompt, waiting for a thread included.", _TINY_S
        )
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a generation.", _TOKENS)
        self._generated = histogram("request_generated_tokens", "Tokens of a generation, of all samples.", _TOKENS)
        self._most = histogram("request_max_tokens", "max_tokens of a generation that sets it.", _TOKENS)
        self._samples = histogram("request_samples", "Samples (n) of a generation.", _SAMPLES)
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of generations sent to an engine.")
        self._generated_tokens = counter("generated_tokens", "Tokens delivered to generations.")
        finished = Counter(
            PREFIX + "finished_samples",
            "Samples that were served to their end, by what ended them: stop, stop_string, length, tool_calls.",
            ["reason"],
            registry=registry,
        )
        self._finished = {reason: finished.labels(reason) for reason in _REASONS}
        self._rejected = Counter(
            PREFIX + "rejected_requests",
            "Requests turned away before work was done for them: invalid, overloaded, tenant_limit and so on.",
            ["reason"],
            registry=registry,
        )
        for reason in ("tenant_limit", *_REJECTIONS.values()):
            self._rejected.labels(reason)

    def observe_inter_token(self, seconds: float) -> None:
        self._gaps.add(seconds)

    def observe_first_token(self, seconds: float, trace_id: str) -> None:
        self._firsts.add(FirstToken(seconds, trace_id))

    def observe_end(self, ended: EndedGeneration) -> None:
        self._ends.add(ended)

    def count_finished(self, end: Completed) -> None:
        self._finished[_finish_reason(end)].inc()

    def count_rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def _observe_gaps(self, gaps: list[float]) -> None:
        for seconds in gaps:
            self._gap.observe(seconds)

    def _observe_firsts(self, firsts: list[FirstToken]) -> None:
        for seconds, trace_id in firsts:
            self._first_token.observe(seconds, _exemplar(trace_id))

    def _observe_ends(self, ends: list[EndedGeneration]) -> None:
        for end in ends:
            self._request.observe(end.seconds, _exemplar(end.trace_id))
            self._prompt_tokens.inc(end.prompt_tokens)
            self._generated_tokens.inc(end.generated_tokens)
            self._prompt.observe(end.prompt_tokens)
            self._generated.observe(end.generated_tokens)
            self._samples.observe(end.samples)
            if end.max_tokens is not None:
                self._most.observe(end.max_tokens)
            if (per_token := end.seconds_per_token) is not None:
                self._per_token.observe(per_token)


def _finish_reason(end: Completed) -> str:
    if end.stop_string is not None:
        return "stop_string"
    if end.has_tool_calls and end.reason is FinishReason.STOP:
        return "tool_calls"
    return "length" if end.reason is FinishReason.LENGTH else "stop"


def _exemplar(trace_id: str) -> dict[str, str] | None:
    """Shown to who asks for OpenMetrics."""
    return {"trace_id": trace_id} if trace_id else None
