"""The tokenizer service's Prometheus metrics; those of generations, tenants and engines have modules of their own.

Must not know: how requests are served.
"""

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge

from service_runtime.metrics import show_process
from tokenizer_service.api.engine_fleet_metrics import EngineFigures, FleetCollector
from tokenizer_service.api.generation_metrics import PREFIX, GenerationMetrics
from tokenizer_service.api.tenant_metrics import TenantMetrics
from tokenizer_service.routing.choice import Reason

# As `engines/losses.py` and `failover` name them.
_LOSSES = ("lost", "hang", "ended", "full")
_GIVEN_UP = ("attempts", "budget", "no_engine", "other_model")


class TokenizerMetrics:
    """All metrics, in a registry of their own. Every gauge of work is 0 when the service is idle."""

    def __init__(self, registry: CollectorRegistry, *, model_name: str = "", version: str = "") -> None:
        self.registry = registry
        self.generations = GenerationMetrics(registry)
        self.tenants = TenantMetrics(registry)
        show_process(registry, PREFIX.rstrip("_"), version, model=model_name)
        self._active = self._gauge("active_requests", "Requests being served, of all methods.")
        self._queue = self._gauge("encode_queue", "Texts waiting for an encode thread.")
        self.requests = Counter(
            PREFIX + "requests",
            "Requests ended, by method and gRPC status code; cancelled and refused ones too.",
            ["method", "code"],
            registry=registry,
        )
        self.stop_string_cancels = self._counter(
            "stop_string_cancels", "Generations ended in the engine because a stop string was found."
        )
        self.slow_requests = self._counter(
            "slow_requests", "Generations that took longer than --slow-request-seconds, logged or not."
        )
        self._failovers = self._by(
            "failovers",
            "Requests (samples, once they part) that an engine took over from another: lost, hang, ended or full.",
            "reason",
            _LOSSES,
        )
        self._failed_failovers = self._by(
            "failed_failovers",
            "Requests that no engine took over, by why: attempts, budget, no_engine, other_model.",
            "cause",
            _GIVEN_UP,
        )
        self._resumed_tokens = self._counter(
            "resumed_tokens", "Generated tokens that requests took along to another engine."
        )
        self._routed = self._by(
            "routed_requests",
            "Requests sent to an engine, by why to that one.",
            "reason",
            [reason.value for reason in Reason],
        )
        self._connected = self._gauge("engines_connected", "Engine replicas connected and usable.")
        self._map_blocks = self._gauge("prefix_map_blocks", "KV blocks of engines that the router knows of.")
        self._startup = self._gauge("startup_seconds", "From the start of the service until it listened.")
        self._fleet = FleetCollector(registry)

    def on_resumed(self, reason: str, num_tokens: int) -> None:
        self._failovers.labels(reason).inc()
        self._resumed_tokens.inc(num_tokens)

    def on_given_up(self, cause: str) -> None:
        self._failed_failovers.labels(cause).inc()

    def count_routed(self, reason: Reason) -> None:
        self._routed.labels(reason.value).inc()

    def started(self, seconds: float) -> None:
        """The service listens, so long after its start."""
        self._startup.set(seconds)

    def watch(
        self,
        *,
        active_requests: Callable[[], int],
        engines_connected: Callable[[], int],
        encode_queue: Callable[[], int],
        prefix_map_blocks: Callable[[], int],
        engines: Callable[[], Iterable[EngineFigures]],
    ) -> None:
        """Reads these from their owners, from any thread, whenever they are asked for."""
        self._active.set_function(active_requests)
        self._connected.set_function(engines_connected)
        self._queue.set_function(encode_queue)
        self._map_blocks.set_function(prefix_map_blocks)
        self._fleet.read = engines

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, registry=self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, registry=self.registry)

    def _by(self, name: str, text: str, label: str, values: Iterable[str]) -> Counter:
        """A counter whose series are there from the start: the first event is then seen as an increase."""
        counter = Counter(PREFIX + name, text, [label], registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter
