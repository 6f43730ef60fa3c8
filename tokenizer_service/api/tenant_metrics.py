"""Metrics by tenant. The label is bounded: only configured tenants have a name, and past a number they are "other".

Must not know: limits, how tenants are recognised.
"""

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from service_runtime.metrics import BoundedLabel
from tokenizer_service.tenants.quota import Quota

MAX_NAMES = 1000
_PREFIX = "tokenwire_tokenizer_tenant"
Quotas = Callable[[], Iterable[tuple[str, Quota]]]


class TenantMetrics:
    """Counters of tenants with a name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._label = BoundedLabel(MAX_NAMES).of
        self._requests = Counter(
            f"{_PREFIX}_requests",
            "Requests of a tenant that ended, by gRPC status code.",
            ["tenant", "code"],
            registry=registry,
        )
        self._refusals = Counter(
            f"{_PREFIX}_refusals",
            "Requests that a limit of their tenant refused, by which.",
            ["tenant", "limit"],
            registry=registry,
        )
        self._tokens = Counter(
            f"{_PREFIX}_tokens",
            "Tokens of a tenant: of prompts, and generated ones.",
            ["tenant", "kind"],
            registry=registry,
        )

    def ended(self, tenant: str, code: str, prompt_tokens: int, generated_tokens: int) -> None:
        name = self._label(tenant)
        self._requests.labels(name, code).inc()
        self._tokens.labels(name, "prompt").inc(prompt_tokens)
        self._tokens.labels(name, "generated").inc(generated_tokens)

    def refused(self, tenant: str, limit: str) -> None:
        self._refusals.labels(self._label(tenant), limit).inc()

    def watch(self, quotas: Quotas) -> None:
        """Reads what is used now from its owner whenever it is asked for."""
        self._registry.register(_Use(quotas, self._label))


class _Use(Collector):
    def __init__(self, quotas: Quotas, label: Callable[[str], str]) -> None:
        self._quotas = quotas
        self._label = label

    def collect(self) -> Iterator[GaugeMetricFamily]:
        active: dict[str, int] = {}
        tokens: dict[str, int] = {}
        for tenant, quota in self._quotas():
            name = self._label(tenant)
            active[name] = active.get(name, 0) + quota.active
            tokens[name] = tokens.get(name, 0) + quota.tokens_in_flight
        yield _gauge("active_requests", "Requests of a tenant being served.", active)
        yield _gauge("tokens_in_flight", "Tokens of the prompts and of max_tokens of a tenant's requests.", tokens)


def _gauge(name: str, text: str, values: dict[str, int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=["tenant"])
    for tenant, value in values.items():
        family.add_metric([tenant], value)
    return family
