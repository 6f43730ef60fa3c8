"""Metrics of each engine replica as this service sees it: they come and go with the replicas.

Must not know: how engines are reached or chosen.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

_PREFIX = "tokenwire_tokenizer_engine_"
# Name and help of each figure.
_GAUGES = {
    "live_requests": "Requests that the engine has from this service.",
    "outstanding_tokens": "Tokens, of prompts and to be generated, that this service waits for from the engine.",
    "breaker_state": "Circuit breaker of each engine: 0 requests pass, 1 one may try, 2 none passes.",
    "is_connected": "1 while the engine is connected and takes new requests.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of samples that ended at the engine.",
    "cached_tokens": "Prompt tokens of samples that ended at the engine, found in its prefix cache.",
}


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """`engine` is its address. The rest: see the help of the metrics."""

    engine: str
    live_requests: int
    outstanding_tokens: int
    breaker_state: int
    is_connected: int
    prompt_tokens: int
    cached_tokens: int


class FleetCollector(Collector):
    """One sample of each metric for each engine there is now. `read` gives the figures, from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.read: Callable[[], Iterable[EngineFigures]] = tuple
        registry.register(self)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        figures = list(self.read())
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(_PREFIX + name, text, labels=["engine"])
            for each in figures:
                gauge.add_metric([each.engine], getattr(each, name))
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(_PREFIX + name, text, labels=["engine"])
            for each in figures:
                counter.add_metric([each.engine], getattr(each, name))
            yield counter
