"""Writes the tables of docs/metrics.md from the registries of both services: `python docs/generate_metrics.py`.

Names, types, labels and meanings come from the code; the rest of the page is written by hand. Must not know: how a
figure comes about.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric

from engine_service.api.engine_metrics import EngineMetrics
from engine_service.core.stats import EngineStats
from engine_service.loop.messages import EngineInfo, EngineReady
from tokenizer_service.api.engine_fleet_metrics import EngineFigures
from tokenizer_service.api.metrics import TokenizerMetrics
from tokenizer_service.http.guard import HttpMetrics
from tokenizer_service.tenants.quota import Quota

TARGET = Path(__file__).with_name("metrics.md")
OWN = "tokenwire_"
_SUFFIXES = {"counter": "_total", "info": "_info"}


def render() -> str:
    """The page, with fresh tables."""
    page = TARGET.read_text()
    for name, families in (("tokenizer", tokenizer_families()), ("engine", engine_families())):
        begin = f"<!-- {name}: made by docs/generate_metrics.py -->"
        pattern = re.compile(re.escape(begin) + r".*?<!-- end -->", re.DOTALL)
        table = f"{begin}\n{_table(families)}\n<!-- end -->"
        page = pattern.sub(lambda _, table=table: table, page)  # type: ignore[misc]
    return page


def engine_families() -> list[Metric]:
    """Of a registry as the engine service makes it once its engine runs."""
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry)
    info = EngineInfo(os.getpid(), "", 1, 1, (), "", "", "", 1, 1, 1)
    metrics.engine_started(EngineReady(info, EngineStats(0, 0, 0, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, {})), 0.0)
    return list(registry.collect())


def tokenizer_families() -> list[Metric]:
    """Of a registry as the tokenizer service makes it, with a sample of each label that comes with requests."""
    registry = CollectorRegistry()
    metrics = TokenizerMetrics(registry)
    metrics.requests.labels("Chat", "OK")
    metrics.tenants.ended("a", "OK", 1, 1)
    metrics.tenants.refused("a", "max_requests")
    metrics.tenants.watch(lambda: [("a", Quota(lambda: 0.0))])
    metrics.watch(
        active_requests=int,
        engines_connected=int,
        encode_queue=int,
        prefix_map_blocks=int,
        engines=lambda: [EngineFigures("127.0.0.1:50051", 0, 0, 0, 1, 0, 0)],
    )
    HttpMetrics(registry, ["/"]).count("/", 200)
    return list(registry.collect())


def name_of(family: Metric) -> str:
    """As a query names it: a counter's with its `_total`, an info's with its `_info`."""
    return family.name + _SUFFIXES.get(family.type, "")


def labels_of(family: Metric) -> list[str]:
    return sorted({label for sample in family.samples for label in sample.labels} - {"le"})


def _table(families: Iterable[Metric]) -> str:
    """Our own metrics by name, then the standard ones of a process."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for family in sorted(families, key=lambda each: (not each.name.startswith(OWN), each.name)):
        labels = ", ".join(f"`{label}`" for label in labels_of(family))
        rows.append(f"| `{name_of(family)}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(rows)


if __name__ == "__main__":
    TARGET.write_text(render())
