"""docs/metrics.md names every metric that a running service exports, and nothing else."""

import asyncio
import re
import time
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from docs.generate_metrics import TARGET, labels_of, name_of, render
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.fixtures.checkpoints import write_succ
from tests.fixtures.http_calls import COMPLETIONS
from tests.fixtures.http_stack import HttpStack, http_stack, together
from tests.fixtures.stack import gauges

OPEN_METRICS = {"accept": "application/openmetrics-text; version=1.0.0"}
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (.*?) \| (.+) \|$", re.MULTILINE)
RATES = re.compile(r"perc|per_second|throughput|_rate(_|$)|:")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    folder = write_succ(tmp_path_factory.mktemp("succ"), resolve_model_folder(DEFAULT_MODEL))
    with http_stack(folder, tmp_path_factory.mktemp("logs"), engine_flags=("--num-blocks", "256")) as made:
        assert made.post(COMPLETIONS, {"prompt": "Hello", "temperature": 0}).status_code == 200
        yield made


def exported(url: str) -> list[Metric]:
    answer = httpx.get(url, headers=OPEN_METRICS)
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    return list(text_string_to_metric_families(answer.text))


def documented(service: str) -> dict[str, tuple[str, set[str]]]:
    """Name -> type and labels, of a service's table."""
    page = TARGET.read_text()
    table = page[page.index(f"<!-- {service}:") :]
    rows = ROW.findall(table[: table.index("<!-- end -->")])
    return {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels, _ in rows}


def test_the_tables_are_fresh() -> None:
    assert TARGET.read_text() == render(), "run `python docs/generate_metrics.py`"


def test_a_running_service_exports_what_the_page_says(stack: HttpStack) -> None:
    tokenizer_port = asyncio.run(stack.tokenizer.port("metrics_port"))
    urls = {"engine": stack.metrics_url, "tokenizer": f"http://127.0.0.1:{tokenizer_port}/metrics"}
    for service, url in urls.items():
        families = exported(url)
        rows = documented(service)
        assert {name_of(family): family.type for family in families} == {name: kind for name, (kind, _) in rows.items()}
        for family in families:
            assert set(labels_of(family)) <= rows[name_of(family)][1], family.name
    by_http = stack.client.get("/metrics", headers=OPEN_METRICS)
    assert by_http.headers["content-type"].startswith("application/openmetrics-text")


# What the prefix cache holds is what was asked for last, at idle too.
CACHED = re.compile(r"kv_blocks\{state=(cached|free)\}|prefix_map_blocks")


def idle_gauges(stack: HttpStack) -> dict[str, float]:
    both = [asyncio.run(gauges(service)) for service in (stack.engine, stack.tokenizer)]
    return {name: value for each in both for name, value in each.items() if not CACHED.search(name)}


def leave(stack: HttpStack) -> None:
    """Asks for a long stream and goes away after its first event."""
    body = {"prompt": [1000], "max_tokens": 4000, "stream": True, "ignore_eos": True}
    with stack.client.stream("POST", COMPLETIONS, json=body) as answer:
        next(answer.iter_raw())


def test_every_gauge_is_back_at_idle_after_load_of_any_kind(stack: HttpStack) -> None:
    before = idle_gauges(stack)
    assert len(before) > 20
    bodies = [
        {"prompt": "Hello", "temperature": 0},
        {"prompt": "Hello", "n": 3, "max_tokens": 20, "temperature": 1.0},
        {"prompt": ["Hello", "Hello there"], "max_tokens": 5},
        {"prompt": [5] * 9000},
        {"prompt": "Hello", "temperature": -1},
    ]
    calls = [lambda body=body: stack.post(COMPLETIONS, body).status_code for body in bodies * 4]
    assert {200, 400} == set(together(calls))
    together([lambda: leave(stack)] * 4)
    stack.until_idle(10.0)
    deadline = time.monotonic() + 5.0
    while (now := idle_gauges(stack)) != before:
        differing = {name: (before.get(name), value) for name, value in now.items() if value != before.get(name)}
        assert time.monotonic() < deadline, f"not back at idle (before, now): {differing}"


@pytest.mark.parametrize("service", ["engine", "tokenizer"])
def test_names_keep_the_rules(service: str) -> None:
    for name, (kind, labels) in documented(service).items():
        assert not RATES.search(name), name
        assert name.endswith("_total") == (kind == "counter"), name
        assert not labels & {"request_id", "trace_id", "prompt", "user"}, name
        unit = re.search(r"_(ms|milliseconds|minutes|hours|kb|mb|mib|gb|gib|percent)(_|$)", name)
        assert unit is None, f"{name} is in no base unit"


def test_names_that_the_other_tables_use_exist() -> None:
    page = TARGET.read_text()
    known = {*documented("engine"), *documented("tokenizer")}
    rest = page[page.index("## What others call it") :]
    named = set(re.findall(r"`(tokenwire_\w+)`", rest))
    assert len(named) > 40
    assert named <= known
