"""Gauges of the engine: what it holds now, and what it is. All of the first kind are back at 0 when nothing runs.

Must not know: how the numbers come about, requests.
"""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Info, Metric, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from engine_service.core.stats import EngineStats
from engine_service.loop.messages import EngineInfo, EngineReady
from service_runtime.metrics import OTHER, BoundedLabel

PREFIX = "tokenwire_engine_"
MAX_TENANT_NAMES = 1000
"""So many names are ever shown in the life of a process; the engine tells of 64 at a time."""


class StateGauges:
    """What the engine holds: shown from a snapshot of its statistics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(PREFIX + name, text, registry=registry)

        self._up = gauge("up", "1 while the engine process serves.")
        self._running = gauge("running_requests", "Requests that hold KV blocks, each sample by itself.")
        self._waiting = gauge("waiting_requests", "Requests in the queue, each sample by itself.")
        self._waiting_tokens = gauge("waiting_tokens", "Prompt tokens of the requests in the queue.")
        self._tenants = _TenantGauges(registry)
        self._blocks = Gauge(
            PREFIX + "kv_blocks",
            "KV blocks: used by requests, cached (free, reusable) or free.",
            ["state"],
            registry=registry,
        )
        self._usage = gauge("kv_cache_usage_ratio", "Used share of the KV blocks, 0 to 1.")

    def show(self, stats: EngineStats) -> None:
        self._up.set(1)
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._waiting_tokens.set(stats.waiting_tokens)
        self._usage.set(stats.used_blocks / stats.total_blocks)
        self._tenants.show(stats)
        self._show_blocks(stats.used_blocks, stats.cached_blocks, stats.free_blocks)

    def clear(self) -> None:
        """There is no engine."""
        for gauge in (self._up, self._running, self._waiting, self._waiting_tokens, self._usage):
            gauge.set(0)
        self._tenants.clear()
        self._show_blocks(0, 0, 0)

    def _show_blocks(self, used: int, cached: int, free: int) -> None:
        for state, value in (("used", used), ("cached", cached), ("free", free)):
            self._blocks.labels(state).set(value)


class _TenantGauges(Collector):
    """Requests by tenant. The sum over all tenants is the number of requests: who is not named is in "other"."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._label = BoundedLabel(MAX_TENANT_NAMES)
        self.clear()
        registry.register(self)

    def clear(self) -> None:
        self._running, self._waiting = {OTHER: 0}, {OTHER: 0}

    def show(self, stats: EngineStats) -> None:
        running, waiting = {OTHER: stats.running}, {OTHER: stats.waiting}
        for name, runs, waits in stats.tenants:
            label = self._label.of(name)
            if label != OTHER:
                running[label], waiting[label] = runs, waits
                running[OTHER] -= runs
                waiting[OTHER] -= waits
        self._running, self._waiting = running, waiting

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        yield _by_tenant("running", "Requests that run, by tenant.", self._running)
        yield _by_tenant("waiting", "Requests that wait, by tenant.", self._waiting)


def _by_tenant(state: str, text: str, counts: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{PREFIX}tenant_{state}_requests", text, labels=["tenant"])
    for tenant, count in counts.items():
        family.add_metric([tenant], count)
    return family


class EngineFacts:
    """What the engine is, how long it took to start, and what its process uses."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        def gauge(name: str, text: str) -> Gauge:
            return Gauge(PREFIX + name, text, registry=registry)

        self._model_name = model_name
        self._pid: int | None = None
        self._model = Info(PREFIX + "model", "The served model and how it is run.", registry=registry)
        self._capacity = gauge("kv_capacity_tokens", "Token positions in the KV cache.")
        self._bytes = gauge("kv_cache_bytes", "Memory of the KV cache, of all ranks.")
        self._max_running = gauge("max_running_requests", "Requests that may run at the same time.")
        self._max_waiting = gauge("max_waiting_requests", "Requests that may wait.")
        self._startup = Gauge(
            PREFIX + "startup_seconds",
            "Time of the last start: loading the model, the first generation, and all of it (total).",
            ["stage"],
            registry=registry,
        )
        self._starts = Counter(PREFIX + "starts", "Engine processes that became ready.", registry=registry)
        ProcessCollector(PREFIX.rstrip("_"), pid=lambda: self._pid or "none", registry=registry)

    def show(self, ready: EngineReady, total_s: float | None) -> None:
        """`total_s`: from the launch of the process, if that was seen."""
        info = ready.info
        self._pid = info.pid
        self._starts.inc()
        self._model.info(_labels(info, self._model_name))
        self._capacity.set(info.num_blocks * info.block_size)
        self._bytes.set(info.num_blocks * info.kv_block_bytes * info.tensor_parallel_size)
        self._max_running.set(info.max_num_requests)
        self._max_waiting.set(info.max_waiting_requests)
        for stage, seconds in (("load", ready.times.load_s), ("warm_up", ready.times.warm_up_s), ("total", total_s)):
            if seconds is not None:
                self._startup.labels(stage).set(seconds)

    def clear(self) -> None:
        """There is no engine; what the last one was stays."""
        self._pid = None
        self._capacity.set(0)
        self._bytes.set(0)


def _labels(info: EngineInfo, model_name: str) -> dict[str, str]:
    return {
        "model": model_name,
        "architecture": info.architecture,
        "dtype": info.dtype,
        "device": info.device,
        "backend": info.backend,
        "weight_format": info.weight_format,
        "tensor_parallel_size": str(info.tensor_parallel_size),
        "max_model_len": str(info.max_model_len),
        "block_size": str(info.block_size),
        "num_blocks": str(info.num_blocks),
        "step_token_budget": str(info.step_token_budget),
    }
