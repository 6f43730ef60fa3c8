"""What the metrics have counted so far, for operators.

Must not know: how requests are served, who asks.
"""

from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from tokenizer_service.api.generation_metrics import PREFIX

_LABELS = {
    "prompt_tokens": "",
    "generated_tokens": "",
    "routed_requests": "reason",
    "failovers": "reason",
    "failed_failovers": "cause",
}


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the start; tokens of requests that have ended."""

    prompt_tokens: int
    generated_tokens: int
    routed: dict[str, int]
    failovers: dict[str, int]
    failed_failovers: dict[str, int]


def read_totals(registry: CollectorRegistry) -> Totals:
    """Looks at these counters only."""
    names = {f"{PREFIX}{name}_total": name for name in _LABELS}
    counts: dict[str, dict[str, int]] = {name: {} for name in _LABELS}
    for metric in registry.restricted_registry(list(names)).collect():
        for sample in metric.samples:
            name = names[sample.name]
            counts[name][sample.labels.get(_LABELS[name], "")] = int(sample.value)
    return Totals(
        sum(counts["prompt_tokens"].values()),
        sum(counts["generated_tokens"].values()),
        counts["routed_requests"],
        counts["failovers"],
        counts["failed_failovers"],
    )
