"""The tokenizer service's Prometheus metrics.

Must not know: how requests are served.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from service_runtime.metrics import Deferred
from tokenizer_service.api.tenant_metrics import TenantMetrics
from tokenizer_service.routing.choice import Reason

_PREFIX = "tokenwire_tokenizer"
_LATENCY_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
_TINY_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class TokenizerMetrics:
    """All metrics, in a registry of their own. Every gauge is 0 when the service is idle and alone."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.tenants = TenantMetrics(registry)
        self._gaps: Deferred[float] = Deferred(registry, self._observe_gaps)
        self._active = self._gauge("active_requests", "Requests being served, of all methods.")
        self.requests = Counter(
            f"{_PREFIX}_requests",
            "Requests ended, by method and gRPC status code; cancelled and refused ones too.",
            ["method", "code"],
            registry=registry,
        )
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "From a generation's arrival to its first token.",
            _LATENCY_S,
        )
        self._inter_token_latency = self._histogram(
            "inter_token_latency_seconds",
            "Between two arrivals of tokens, per token of the later.",
            _SHORT_S,
        )
        self.request_seconds = self._histogram("request_seconds", "From a generation's arrival to its end.", _LATENCY_S)
        self.encode_seconds = self._histogram(
            "encode_seconds",
            "Template and encoding of a prompt, waiting for a thread included.",
            _TINY_S,
        )
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of generations sent to an engine.")
        self.generated_tokens = self._counter("generated_tokens", "Tokens delivered to generations.")
        self.stop_string_cancels = self._counter(
            "stop_string_cancels", "Generations ended in the engine because a stop string was found."
        )
        self._failovers = Counter(
            f"{_PREFIX}_failovers",
            "Requests (samples, once they part) that an engine took over from another: lost, hang, ended or full.",
            ["reason"],
            registry=registry,
        )
        self._failed_failovers = Counter(
            f"{_PREFIX}_failed_failovers",
            "Requests that no engine took over: attempts, budget, no_engine or other_model.",
            ["cause"],
            registry=registry,
        )
        self._resumed_tokens = self._counter(
            "resumed_tokens", "Generated tokens that requests took along to another engine."
        )
        self._engines = self._gauge("engines_connected", "Engine replicas connected and usable.")
        self._queue = self._gauge("encode_queue", "Texts waiting for an encode thread.")
        self._map_blocks = self._gauge("prefix_map_blocks", "KV blocks of engines that the router knows of.")
        routed = Counter(
            f"{_PREFIX}_routed_requests",
            "Requests sent to an engine, by why to that one.",
            ["reason"],
            registry=registry,
        )
        self._routed = {reason: routed.labels(reason=reason.value) for reason in Reason}
        self._engine_tokens = EngineTokensCollector(registry)

    def on_resumed(self, reason: str, num_tokens: int) -> None:
        self._failovers.labels(reason=reason).inc()
        self._resumed_tokens.inc(num_tokens)

    def on_given_up(self, cause: str) -> None:
        self._failed_failovers.labels(cause=cause).inc()

    def observe_inter_token(self, seconds: float) -> None:
        """Seen by the next reader of the metrics."""
        self._gaps.add(seconds)

    def _observe_gaps(self, gaps: list[float]) -> None:
        for seconds in gaps:
            self._inter_token_latency.observe(seconds)

    def watch(
        self,
        *,
        active_requests: Callable[[], int],
        engines_connected: Callable[[], int],
        encode_queue: Callable[[], int],
        prefix_map_blocks: Callable[[], int],
        engine_tokens: "Callable[[], Sequence[EngineTokens]]",
        breakers: Callable[[], Iterable[tuple[str, int]]],
    ) -> None:
        """Reads the gauges from their owners whenever they are asked for."""
        self._active.set_function(active_requests)
        self._engines.set_function(engines_connected)
        self._queue.set_function(encode_queue)
        self._map_blocks.set_function(prefix_map_blocks)
        self._engine_tokens.read = engine_tokens
        self.registry.register(_BreakerStates(breakers))

    def count_routed(self, reason: Reason) -> None:
        self._routed[reason].inc()

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{_PREFIX}_{name}", text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{_PREFIX}_{name}", text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"{_PREFIX}_{name}", text, registry=self.registry, buckets=buckets)


@dataclass(frozen=True, slots=True)
class EngineTokens:
    """Prompt tokens of the requests that ended at one engine, and how many of them were cached."""

    engine: str
    prompt: int
    cached: int


class EngineTokensCollector(Collector):
    """Per-engine counters that come and go with the engines. `read` gives them, from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.read: Callable[[], Sequence[EngineTokens]] = tuple
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        prompt = CounterMetricFamily(f"{_PREFIX}_engine_prompt_tokens", "Prompt tokens by engine.", labels=["engine"])
        cached = CounterMetricFamily(
            f"{_PREFIX}_engine_cached_tokens", "Of them, found in the engine's prefix cache.", labels=["engine"]
        )
        for each in self.read():
            prompt.add_metric([each.engine], each.prompt)
            cached.add_metric([each.engine], each.cached)
        return (prompt, cached)


@dataclass(frozen=True, slots=True)
class _BreakerStates(Collector):
    """One sample for each engine there is now."""

    states: Callable[[], Iterable[tuple[str, int]]]

    def collect(self) -> Iterable[Metric]:
        gauge = GaugeMetricFamily(
            f"{_PREFIX}_engine_breaker_state",
            "Circuit breaker of each engine: 0 requests pass, 1 one may try, 2 none passes.",
            labels=["engine"],
        )
        for engine, state in self.states():
            gauge.add_metric([engine], state)
        return (gauge,)
