"""The engine's Prometheus metrics, fed on the front from the engine's reports, never in the loop.

Must not know: gRPC, how the numbers come about.
"""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine_service.api.errors import outcome_of
from engine_service.core.outcome import Finish, FinishReason, Refusal
from engine_service.core.stats import EngineStats
from engine_service.loop.messages import RequestTiming, StepReport, StepTiming
from service_runtime.metrics import Deferred

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
# EngineStats field -> counter name and help: cumulative in the engine, added here as differences.
_CUMULATIVE = {
    "preemptions": ("preemptions", "Running requests that gave their KV blocks up and were recomputed"),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed"),
    "generated_tokens": ("generated_tokens", "Tokens sampled"),
    "looked_up_tokens": ("prefix_lookup_tokens", "Prompt tokens looked up in the prefix cache"),
    "cached_tokens": ("prefix_hit_tokens", "Prompt tokens found in the prefix cache"),
    "evictions": ("kv_block_evictions", "KV blocks whose reusable content was given up"),
    "steps": ("steps", "Engine steps"),
}


@dataclass(frozen=True, slots=True)
class _Report:
    """What metrics need of a StepReport."""

    stats: EngineStats
    steps: tuple[StepTiming, ...]
    finished: tuple[RequestTiming, ...]


class EngineMetrics:
    """Every gauge is back at its idle value when nothing runs; a request counts once, whatever its end."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._reports: Deferred[_Report] = Deferred(registry, self._observe_reports)
        prefix = "tokenwire_engine_"
        self._up = Gauge(f"{prefix}up", "1 while the engine process serves", registry=registry)
        self._running = Gauge(
            f"{prefix}running_requests", "Requests that hold KV blocks, each sample by itself", registry=registry
        )
        self._waiting = Gauge(
            f"{prefix}waiting_requests", "Requests in the queue, each sample by itself", registry=registry
        )
        self._waiting_tokens = Gauge(f"{prefix}waiting_tokens", "Their prompt tokens", registry=registry)
        self._tenants = {
            state: Gauge(
                f"{prefix}tenant_{state}_requests",
                f"Requests that are {state}, by tenant; the first 64 tenants with requests",
                ["tenant"],
                registry=registry,
            )
            for state in ("running", "waiting")
        }
        self._blocks = Gauge(
            f"{prefix}kv_blocks",
            "KV blocks: used by requests, cached (free, reusable) or free",
            ["state"],
            registry=registry,
        )
        self._usage = Gauge(f"{prefix}kv_cache_usage_ratio", "Used share of the KV blocks", registry=registry)
        self._counters = {
            field: Counter(prefix + name, text, registry=registry) for field, (name, text) in _CUMULATIVE.items()
        }
        self._requests = Counter(
            f"{prefix}requests",
            "Requests by outcome (stop, length, abort, error, rejected) and refusal code; samples count as one",
            ["outcome", "code"],
            registry=registry,
        )
        self._step_seconds = Histogram(f"{prefix}step_seconds", "Time of a step", buckets=_SECONDS, registry=registry)
        self._step_tokens = Histogram(
            f"{prefix}step_tokens", "Tokens computed in a step", buckets=_TOKENS, registry=registry
        )
        self._stages = {
            stage: Histogram(
                f"{prefix}{stage}_seconds",
                f"Time of a request in {stage}",
                buckets=_SECONDS,
                registry=registry,
            )
            for stage in ("queue", "prefill", "decode")
        }
        for reason in FinishReason:
            if reason is not FinishReason.ERROR:
                self._requests.labels(reason.value, "")
        self._last: EngineStats | None = None

    def engine_started(self, stats: EngineStats) -> None:
        """A fresh engine: its counters start from zero again, ours go on."""
        self._reports.flush()
        self._up.set(1)
        self._last = stats
        self._show(stats)

    def engine_ended(self) -> None:
        self._reports.flush()
        self._up.set(0)
        for gauge in (self._running, self._waiting, self._waiting_tokens, self._usage):
            gauge.set(0)
        for state in ("used", "cached", "free"):
            self._blocks.labels(state).set(0)
        self._show_tenants(())

    def observe_report(self, report: StepReport) -> None:
        """Seen by the next reader of the metrics."""
        self._reports.add(_Report(report.stats, report.steps, report.finished))

    def _observe_reports(self, reports: list[_Report]) -> None:
        """Reports of one engine, oldest first."""
        last, stats = self._last, reports[-1].stats
        for field, counter in self._counters.items():
            difference = getattr(stats, field) - (getattr(last, field) if last else 0)
            if difference > 0:
                counter.inc(difference)
        self._last = stats
        self._show(stats)
        for report in reports:
            for step in report.steps:
                self._step_seconds.observe(step.seconds)
                self._step_tokens.observe(step.num_tokens)
            for timing in report.finished:
                self._observe_stages(timing)

    def count_request(self, finish: Finish) -> None:
        """An ended request."""
        code = finish.error.code.value if finish.error else ""
        self._requests.labels(outcome_of(finish), code).inc()

    def count_rejected(self, refusal: Refusal) -> None:
        """A request that never reached the engine."""
        self._requests.labels("rejected", refusal.code.value).inc()

    def _observe_stages(self, timing: RequestTiming) -> None:
        for stage, seconds in (
            ("queue", timing.queue_s),
            ("prefill", timing.prefill_s),
            ("decode", timing.decode_s),
        ):
            if seconds is not None:
                self._stages[stage].observe(seconds)

    def _show(self, stats: EngineStats) -> None:
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._waiting_tokens.set(stats.waiting_tokens)
        self._usage.set(stats.used_blocks / stats.total_blocks)
        self._show_tenants(stats.tenants)
        for state, value in (
            ("used", stats.used_blocks),
            ("cached", stats.cached_blocks),
            ("free", stats.free_blocks),
        ):
            self._blocks.labels(state).set(value)

    def _show_tenants(self, tenants: tuple[tuple[str, int, int], ...]) -> None:
        """Names without requests are shown no longer."""
        for gauge in self._tenants.values():
            gauge.clear()
        for name, running, waiting in tenants:
            self._tenants["running"].labels(name).set(running)
            self._tenants["waiting"].labels(name).set(waiting)
