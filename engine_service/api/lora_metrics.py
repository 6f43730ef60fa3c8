"""Metrics of LoRA adapters.

Must not know: gRPC, how adapters are kept.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

from engine_service.api.engine_gauges import PREFIX
from engine_service.loop.messages import AdapterNews


class LoraMetrics:
    """Fed when adapters have changed."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._adapters = Gauge(
            PREFIX + "lora_adapters",
            "LoRA adapters by state: known by name, or resident in memory.",
            ["state"],
            registry=registry,
        )
        self._loads = Counter(PREFIX + "lora_loads", "LoRA adapters taken into memory.", registry=registry)
        self._evictions = Counter(
            PREFIX + "lora_evictions", "LoRA adapters that left memory to make room.", registry=registry
        )
        self._last = AdapterNews()
        self.show(self._last)

    def started(self, news: AdapterNews) -> None:
        """A fresh engine: its counters start from zero again, ours go on."""
        self._last = AdapterNews()
        self.show(news)

    def show(self, news: AdapterNews) -> None:
        self._adapters.labels("known").set(len(news.adapters))
        self._adapters.labels("resident").set(sum(adapter.is_resident for adapter in news.adapters))
        self._loads.inc(news.loads - self._last.loads)
        self._evictions.inc(news.evictions - self._last.evictions)
        self._last = news
