"""Counters and histograms of the engine's work: of its steps, and of requests by how they ended.

Must not know: gRPC, how the numbers come about.
"""

from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram

from engine_service.api.engine_gauges import PREFIX
from engine_service.core.outcome import FinishReason, RefusalCode
from engine_service.loop.messages import RequestTiming, StepTiming
from service_runtime.metrics import powers_of_two, seconds_buckets

REJECTED = "rejected"
_SECONDS = (*seconds_buckets(0.001, 10.0), 30.0, 60.0, 120.0)
_KINDS = ("decode", "prefill", "mixed", "empty")


class StepMetrics:
    """Told of each step once. An `empty` one only makes the worker forget requests."""

    def __init__(self, registry: CollectorRegistry) -> None:
        seconds = Histogram(
            PREFIX + "step_seconds",
            "Time of a step, by what it computed: decode, prefill, mixed, or nothing (empty).",
            ["kind"],
            buckets=_SECONDS,
            registry=registry,
        )
        self._seconds = {kind: seconds.labels(kind) for kind in _KINDS}
        self._tokens = Histogram(
            PREFIX + "step_tokens", "Tokens computed in a step.", buckets=powers_of_two(16_384), registry=registry
        )
        self._requests = Histogram(
            PREFIX + "step_requests",
            "Requests in a step, each sample by itself.",
            buckets=powers_of_two(1024),
            registry=registry,
        )

    def observe(self, step: StepTiming) -> None:
        self._seconds[_kind(step)].observe(step.seconds)
        self._tokens.observe(step.num_tokens)
        self._requests.observe(step.num_requests)


def _kind(step: StepTiming) -> str:
    if step.prefill_tokens == 0:
        return "decode" if step.num_tokens else "empty"
    return "prefill" if step.prefill_tokens == step.num_tokens else "mixed"


class EndedRequest(NamedTuple):
    """A request as it is counted. `code` is empty unless it was refused or failed; `completions` of each sample."""

    outcome: str
    code: str
    prompt_tokens: int = 0
    max_tokens: int = 0
    completions: tuple[int, ...] = ()


class RequestMetrics:
    """A request counts once, whatever its end and however many samples it had."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = Counter(
            PREFIX + "requests",
            "Requests by outcome (stop, length, abort, error, rejected) and refusal code; samples count as one.",
            ["outcome", "code"],
            registry=registry,
        )
        for reason in FinishReason:
            if reason is not FinishReason.ERROR:
                self._requests.labels(reason.value, "")
        self._requests.labels(REJECTED, RefusalCode.QUEUE_FULL.value)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, text, buckets=buckets, registry=registry)

        self._queue = histogram("queue_seconds", "From a request's arrival to its first step.", _SECONDS)
        self._prefill = histogram("prefill_seconds", "From a request's first step to its first token.", _SECONDS)
        self._decode = histogram("decode_seconds", "From a request's first token to its last.", _SECONDS)
        self._inference = histogram("inference_seconds", "From a request's first step to its last token.", _SECONDS)
        tokens, samples = powers_of_two(131_072), powers_of_two(128)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens of a request.", tokens)
        self._generated = histogram("request_generated_tokens", "Tokens generated for a sample.", tokens)
        self._most = histogram("request_max_tokens", "max_tokens of a request; unset: what there is room for.", tokens)
        self._samples = histogram("request_samples", "Samples (n) of a request.", samples)

    def observe_timing(self, timing: RequestTiming) -> None:
        """A prefill that did not come to its first token says nothing about how long one takes."""
        self._queue.observe(timing.queue_s)
        if timing.prefill_s is not None and timing.decode_s is not None:
            self._prefill.observe(timing.prefill_s)
            self._decode.observe(timing.decode_s)
            self._inference.observe(timing.prefill_s + timing.decode_s)

    def observe_end(self, ended: EndedRequest) -> None:
        """What was rejected has no shape: it was not served."""
        self._requests.labels(ended.outcome, ended.code).inc()
        if ended.outcome != REJECTED:
            self._prompt.observe(ended.prompt_tokens)
            self._most.observe(ended.max_tokens)
            self._samples.observe(len(ended.completions))
            for tokens in ended.completions:
                self._generated.observe(tokens)
