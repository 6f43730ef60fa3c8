"""The engine's Prometheus metrics, fed on the front from the engine's reports, never in the loop.

What there is of each kind is in `engine_gauges` and `work_metrics`. Must not know: gRPC, how the numbers come about.
"""

from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge

from engine_service.api.engine_gauges import PREFIX, EngineFacts, StateGauges
from engine_service.api.errors import outcome_of
from engine_service.api.live_request import Submission
from engine_service.api.lora_metrics import LoraMetrics
from engine_service.api.work_metrics import REJECTED, EndedRequest, RequestMetrics, StepMetrics
from engine_service.core.outcome import Finish, Refusal
from engine_service.core.stats import EngineStats
from engine_service.loop.messages import AdapterNews, EngineReady, RequestTiming, StepReport, StepTiming
from service_runtime.metrics import Deferred, show_process

# EngineStats field -> counter name and help: cumulative in the engine, added here as differences.
_CUMULATIVE = {
    "preemptions": ("preemptions", "Running requests that gave their KV blocks up and were recomputed."),
    "prompt_tokens": ("prompt_tokens", "Prompt tokens computed."),
    "generated_tokens": ("generated_tokens", "Tokens sampled."),
    "looked_up_tokens": ("prefix_lookup_tokens", "Prompt tokens looked up in the prefix cache."),
    "cached_tokens": ("prefix_hit_tokens", "Prompt tokens found in the prefix cache."),
    "evictions": ("kv_block_evictions", "KV blocks whose reusable content was given up."),
    "steps": ("steps", "Engine steps."),
    "drafted_tokens": ("speculation_drafted_tokens", "Guessed tokens that were verified."),
    "accepted_tokens": ("speculation_accepted_tokens", "Guessed tokens that were right."),
}


@dataclass(frozen=True, slots=True)
class _Report:
    """What metrics need of a StepReport."""

    stats: EngineStats
    steps: tuple[StepTiming, ...]
    finished: tuple[RequestTiming, ...]


class EngineMetrics:
    """Every gauge of what the engine holds is 0 when nothing runs; a request counts once, whatever its end."""

    def __init__(self, registry: CollectorRegistry, *, model_name: str = "", version: str = "") -> None:
        self._reports: Deferred[_Report] = Deferred(registry, self._observe_reports)
        self._ended: Deferred[EndedRequest] = Deferred(registry, self._observe_ended)
        show_process(registry, PREFIX.rstrip("_"), version)
        self._facts = EngineFacts(registry, model_name)
        self._state = StateGauges(registry)
        self._steps = StepMetrics(registry)
        self._requests = RequestMetrics(registry)
        self._counters = {
            field: Counter(PREFIX + name, text, registry=registry) for field, (name, text) in _CUMULATIVE.items()
        }
        self._stalled = Gauge(
            PREFIX + "stalled_seconds",
            "Time without a finished step while there is work; 0 without work.",
            registry=registry,
        )
        self._lora = LoraMetrics(registry)
        self._sessions = Gauge(PREFIX + "sessions", "Session streams of tokenizer services.", registry=registry)
        self._last: EngineStats | None = None

    def watch(self, *, stalled_s: Callable[[], float], sessions: Callable[[], int]) -> None:
        """Reads these from their owners, from any thread, whenever they are asked for."""
        self._stalled.set_function(stalled_s)
        self._sessions.set_function(sessions)

    def engine_started(self, ready: EngineReady, total_s: float | None = None) -> None:
        """A fresh engine: its counters start from zero again, ours go on. `total_s`: how long its start took."""
        self._reports.flush()
        self._last = ready.stats
        self._facts.show(ready, total_s)
        self._state.show(ready.stats)
        self._lora.started(ready.adapters)

    def engine_ended(self) -> None:
        self._reports.flush()
        self._facts.clear()
        self._lora.started(AdapterNews())
        self._state.clear()

    def observe_report(self, report: StepReport) -> None:
        """Seen by the next reader of the metrics."""
        if report.adapters is not None:
            self._lora.show(report.adapters)
        self._reports.add(_Report(report.stats, report.steps, report.finished))

    def count_request(self, submission: Submission, finish: Finish) -> None:
        """An ended request. Seen by the next reader."""
        code = finish.error.code.value if finish.error else ""
        completions = tuple(submission.completion_tokens)
        self._ended.add(
            EndedRequest(outcome_of(finish), code, submission.prompt_tokens, submission.max_tokens, completions)
        )

    def count_rejected(self, refusal: Refusal) -> None:
        """A request that never reached the engine."""
        self._ended.add(EndedRequest(REJECTED, refusal.code.value))

    def _observe_reports(self, reports: list[_Report]) -> None:
        """Reports of one engine, oldest first."""
        last, stats = self._last, reports[-1].stats
        for field, counter in self._counters.items():
            difference = getattr(stats, field) - (getattr(last, field) if last else 0)
            if difference > 0:
                counter.inc(difference)
        self._last = stats
        self._state.show(stats)
        for report in reports:
            for step in report.steps:
                self._steps.observe(step)
            for timing in report.finished:
                self._requests.observe_timing(timing)

    def _observe_ended(self, ended: list[EndedRequest]) -> None:
        for each in ended:
            self._requests.observe_end(each)
