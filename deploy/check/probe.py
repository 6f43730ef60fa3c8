"""Checks a running Compose stack from outside, as an operator would: answers, metrics, alerts, board, scaling, its end.

`python -m deploy.check.probe` in the repository's root, with the stack up; `run.sh` calls it. The variable COMPOSE says
how Compose is called. Must not know: what is inside the services.
"""

import json
import os
import shlex
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

from deploy.grafana.panels import ROWS

HTTP = "http://127.0.0.1:8000"
PROMETHEUS = "http://127.0.0.1:9090"
WAIT_S = 180.0
POLL_S = 1.0
STOP_LIMIT_S = 10.0
QUESTION = "What is the capital of France? Answer briefly."


class CheckFailed(Exception):
    """Something is not as it should be; the message says what."""


def compose(*arguments: str) -> str:
    """Standard output of a Compose command that must succeed."""
    command = [*shlex.split(os.environ.get("COMPOSE", "docker compose")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the caller's own command
    if done.returncode != 0:
        raise CheckFailed(f"{shlex.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=30) as answer:  # noqa: S310 - our own loopback addresses
        return json.load(answer)


def chat(text: str, max_tokens: int) -> str:
    """A greedy answer over the published HTTP port."""
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}
    request = urllib.request.Request(  # noqa: S310
        f"{HTTP}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:  # noqa: S310
        return str(json.load(answer)["choices"][0]["message"]["content"])


def ask(expression: str) -> list[dict[str, Any]]:
    """The samples of an instant query."""
    answer = get(f"{PROMETHEUS}/api/v1/query?{urllib.parse.urlencode({'query': expression})}")
    return list(answer["data"]["result"])


def wait_for(what: str, is_so: Callable[[], object]) -> None:
    """Returns when `is_so()` is true. Raises CheckFailed after WAIT_S."""
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise CheckFailed(f"after {WAIT_S:.0f} s still not so: {what}")
        time.sleep(POLL_S)
    print(f"ok: {what}", flush=True)


def targets_up(job: str) -> int:
    return sum(int(sample["value"][1]) for sample in ask(f'up{{job="{job}"}}'))


def check_answer() -> None:
    answer = chat(QUESTION, 32)
    if "Paris" not in answer:
        raise CheckFailed(f"the answer over HTTP is {answer!r}")
    print(f"ok: {QUESTION} {answer}", flush=True)


def check_targets(engines: int) -> None:
    """Every container is scraped, and none fails."""
    wait_for(f"{engines} engines are scraped", lambda: targets_up("tokenwire-engine") == engines)
    wait_for("the tokenizer service is scraped", lambda: targets_up("tokenwire-tokenizer") == 1)
    targets = get(f"{PROMETHEUS}/api/v1/targets?state=active")["data"]["activeTargets"]
    failing = [f"{target['scrapeUrl']}: {target['lastError']}" for target in targets if target["health"] != "up"]
    if failing:
        raise CheckFailed(f"targets that are not up: {failing}")
    print(f"ok: all {len(targets)} targets are up", flush=True)


def check_rules() -> None:
    """Every rule evaluates, every recorded series has data, and nothing fires."""
    rules = [rule for group in get(f"{PROMETHEUS}/api/v1/rules")["data"]["groups"] for rule in group["rules"]]
    broken = [rule["name"] for rule in rules if rule["health"] == "err"]
    if broken:
        raise CheckFailed(f"rules that fail: {broken}")
    recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
    for name in recorded:
        wait_for(f"{name} has data", partial(has_numbers, name))
    firing = [rule["name"] for rule in rules if rule.get("state") == "firing"]
    if firing:
        raise CheckFailed(f"alerts that fire: {firing}")
    print(f"ok: {len(rules)} rules, {len(recorded)} recorded, none fires", flush=True)


def has_numbers(expression: str) -> bool:
    """Whether a query returns a sample that is not 0 / 0."""
    return any(sample["value"][1] != "NaN" for sample in ask(expression))


def check_board() -> None:
    """Every query of the board returns data, as Grafana would send it."""
    count = 0
    for row in ROWS:
        for panel in row.panels:
            for query in panel.queries:
                expression = query.expression.replace("$__rate_interval", "1m").replace("$engine", ".*")
                wait_for(f"{row.title} / {panel.title} / {query.legend}", partial(has_numbers, expression))
                count += 1
    print(f"ok: {count} queries of the board return data", flush=True)


@contextmanager
def traffic() -> Iterator[None]:
    """Short answers one after the other, so that every rate has something to count."""
    is_over = threading.Event()

    def send() -> None:
        while not is_over.is_set():
            chat("Name three rivers.", 24)

    with ThreadPoolExecutor(1) as sender:
        sending = sender.submit(send)
        try:
            yield
        finally:
            is_over.set()
            sending.result()


def check_scaling() -> None:
    """A second engine is found by DNS, and gets requests; the first one goes, and the second answers."""
    compose("up", "--detach", "--no-recreate", "--scale", "engine=2")
    connected = "max(tokenwire_tokenizer_engines_connected)"
    wait_for("two engines are connected", lambda: ask(connected)[0]["value"][1] == "2")
    check_targets(engines=2)
    check_answer()


def check_load() -> None:
    """The profile `load` sends requests; its report comes out of its volume."""
    compose("--profile", "load", "build", "load")
    flags = ["--rate", "2", "--duration", "30", "--warmup", "0", "--input", "60", "--output", "16", "--prefixes", "2"]
    flags += ["--prefix-tokens", "40"]
    files = ["--json-file", "/reports/report.json", "--html-file", "/reports/report.html"]
    compose("--profile", "load", "run", "--rm", "load", "run", "--target", "tokenizer:50050", *flags, *files)
    report = json.loads(
        compose("--profile", "load", "run", "--rm", "--entrypoint", "cat", "load", "/reports/report.json")
    )
    print(f"ok: load test, report of {len(json.dumps(report)):,} characters", flush=True)


def check_end() -> None:
    """`down` in time, while an answer is being generated."""
    body = {"messages": [{"role": "user", "content": "Tell me a long story."}], "max_tokens": 4000, "stream": True}
    body |= {"ignore_eos": True}
    request = urllib.request.Request(  # noqa: S310
        f"{HTTP}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as stream:  # noqa: S310
        stream.readline()
        started = time.monotonic()
        compose("--profile", "observe", "down")
    took = time.monotonic() - started
    if took > STOP_LIMIT_S:
        raise CheckFailed(f"down took {took:.1f} s, more than {STOP_LIMIT_S:.0f} s")
    print(f"ok: down took {took:.1f} s with an answer on its way", flush=True)


def main() -> int:
    try:
        check_answer()
        check_targets(engines=1)
        check_load()
        with traffic():
            check_rules()
            check_board()
        check_scaling()
        check_end()
    except (CheckFailed, OSError) as error:
        print(f"failed: {error}", file=sys.stderr)
        return 1
    print("the stack is as it should be")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
