"""Recording rules, alerts, the runbook and the board: at one with each other and with what the services really show."""

import asyncio
import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.grafana import dashboard
from tests.fixtures.stack import ServiceProcess, running_stack
from tokenwire_client import AsyncClient, Message, Sampling

ROOT = Path(__file__).parents[2]
RULES = ROOT / "deploy" / "prometheus" / "rules"
RUNBOOK = ROOT / "docs" / "runbook.md"
SEVERITIES = {"critical", "warning"}
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


def rules(kind: str) -> list[dict[str, Any]]:
    """The rules with that key, `alert` or `record`."""
    groups = [group for file in sorted(RULES.glob("*.yml")) for group in yaml.safe_load(file.read_text())["groups"]]
    return [rule for group in groups for rule in group["rules"] if kind in rule]


def board_expressions() -> list[str]:
    """As Grafana sends them."""
    panels = json.loads(dashboard.TARGET.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    return [text.replace("$__rate_interval", "1m").replace("$engine", ".*") for text in expressions]


def expressions() -> list[str]:
    return [rule["expr"] for rule in [*rules("alert"), *rules("record")]] + board_expressions()


def selectors(expression: str) -> Iterator[tuple[str, set[str]]]:
    """Name and labels of each series that an expression reads."""
    found: list[Any] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    for node in found:
        yield node.name, {matcher.name for matcher in node.matchers.matchers}


@pytest.mark.parametrize("expression", expressions())
def test_every_expression_is_promql(expression: str) -> None:
    promql_parser.parse(expression)


def test_an_expression_with_a_mistake_is_found() -> None:
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        promql_parser.parse("sum(rate(up[5m])")


def test_every_alert_has_a_section_in_the_runbook_and_no_section_is_left_over() -> None:
    sections = re.findall(r"^## (\S+)$", RUNBOOK.read_text(), flags=re.MULTILINE)
    alerts = [rule["alert"] for rule in rules("alert")]
    assert len(alerts) > 10
    assert sorted(alerts) == sorted(sections)
    for rule in rules("alert"):
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in SEVERITIES


def test_every_section_of_the_runbook_says_what_it_means_and_what_to_do() -> None:
    _, *sections = RUNBOOK.read_text().split("\n## ")
    for section in sections:
        for part in ("**Means:**", "**Likely:**", "**Look at:**", "**Do:**"):
            assert section.count(part) == 1, (part, section.splitlines()[0])


def test_every_link_within_the_runbook_leads_to_a_section() -> None:
    page = RUNBOOK.read_text()
    sections = {name.lower() for name in re.findall(r"^## (\S+)$", page, flags=re.MULTILINE)}
    assert set(re.findall(r"\]\(#([^)]+)\)", page)) <= sections


def test_every_recorded_series_that_is_read_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules("record")}
    read = {name for text in expressions() for name, _ in selectors(text) if name.startswith("tokenwire:")}
    assert read
    assert read <= recorded


def test_the_board_is_fresh() -> None:
    assert dashboard.TARGET.read_text() == dashboard.render(), "run `python -m deploy.grafana.dashboard`"


def test_panels_of_the_board_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in json.loads(dashboard.TARGET.read_text())["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells


async def test_every_series_that_rules_and_board_read_is_one_that_the_services_show(tmp_path: Path) -> None:
    async with running_stack("smollm2-135m-instruct", tmp_path) as stack, AsyncClient(stack.target) as client:
        await client.chat([Message("user", "Name a river.")], Sampling(max_tokens=4)).result()
        shown = {}
        for service in (stack.engine, stack.tokenizer):
            shown |= await series_of(service)
    own = {(name, label) for text in expressions() for name, labels in selectors(text) for label in {"", *labels}}
    own = {(name, label) for name, label in own if name.startswith("tokenwire_") and label != "instance"}
    assert len(own) > 20
    for name, label in own:
        assert name in shown, name
        if label and shown[name]:
            assert label in shown[name], (name, label)


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as answer:
        return str(answer.read().decode())


async def series_of(service: ServiceProcess) -> dict[str, set[str]]:
    """Names of the series of a service, also of those that have no sample yet, and their labels as far as they show."""
    text = await asyncio.to_thread(read, f"http://127.0.0.1:{await service.port('metrics_port')}/metrics")
    shown: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        names = {family.name, *(sample.name for sample in family.samples)}
        if family.type == "counter":
            names.add(f"{family.name}_total")
        if family.type == "histogram":
            names |= {family.name + part for part in HISTOGRAM_PARTS}
        labels = {label for sample in family.samples for label in sample.labels}
        shown |= dict.fromkeys(names, labels)
    return shown
