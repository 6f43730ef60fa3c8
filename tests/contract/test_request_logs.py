"""What both services log of requests, as processes whose log is no terminal: JSON, ids in every line, slow ones."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from service_runtime.slow_requests import BURST
from tests.fixtures.checkpoints import write_succ
from tests.fixtures.http_calls import CHAT, COMPLETIONS
from tests.fixtures.http_stack import HttpStack, http_stack, together
from tests.fixtures.stack import ServiceProcess

OF_REQUESTS = {"request_end", "slow_request", "request finished", "request rejected", "http_refused", "request_failed"}
STAGES = ("encode", "wait", "queue", "prefill", "decode", "deliver")
HELLO = {"prompt": "Hello", "temperature": 0}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HttpStack]:
    """Every generation is slow here. The format is what an operator gets without asking."""
    folder = write_succ(tmp_path_factory.mktemp("succ"), resolve_model_folder(DEFAULT_MODEL))
    flags = ("--log-format", "auto", "--slow-request-seconds", "0.000001")
    engine = (*flags, "--num-blocks", "256")
    with http_stack(folder, tmp_path_factory.mktemp("logs"), engine_flags=engine, tokenizer_flags=flags) as made:
        yield made


def lines(service: ServiceProcess) -> list[dict[str, Any]]:
    """Every line: one that is not JSON fails."""
    return [json.loads(line) for line in service.log.read_text().splitlines()]


def test_every_line_is_json_and_those_of_requests_say_which(stack: HttpStack) -> None:
    answers = [
        stack.post(COMPLETIONS, HELLO, headers={"x-request-id": "mine"}),
        stack.post(COMPLETIONS, HELLO | {"max_tokens": 10**9, "prompt": [5] * 9000}),
        stack.post(CHAT, {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}),
        stack.post(COMPLETIONS, HELLO, headers={"x-request-id": "x" * 300}),
    ]
    assert [answer.status_code for answer in answers] == [200, 400, 200, 400]
    stack.until_idle()
    seen = set()
    for service in (stack.tokenizer, stack.engine):
        for line in lines(service):
            assert {"event", "level", "timestamp", "service"} <= line.keys()
            if line["event"] in OF_REQUESTS:
                assert line["request_id"], line
                seen.add(line["event"])
    assert seen >= {"request_end", "slow_request", "request finished", "http_refused"}
    mine = [line["event"] for line in lines(stack.tokenizer) if line.get("request_id") == "mine"]
    assert sorted(mine) == ["request_end", "slow_request"]
    theirs = [line["event"] for line in lines(stack.engine) if str(line.get("request_id")).startswith("mine~")]
    assert sorted(theirs) == ["request finished", "slow_request"]


def test_a_slow_request_says_where_its_time_went(stack: HttpStack) -> None:
    answer = stack.post(COMPLETIONS, HELLO, headers={"x-request-id": "slow"})
    assert answer.status_code == 200
    mine = [line for line in lines(stack.tokenizer) if line.get("request_id") == "slow"]
    (line,) = [each for each in mine if each["level"] == "warning"]
    assert line["event"] == "slow_request"
    stages = [line[f"{stage}_seconds"] for stage in STAGES]
    assert min(stages) >= 0
    assert sum(stages) == pytest.approx(line["seconds"], abs=0.002)
    assert line["prefill_seconds"] > 0
    assert (line["finish_reason"], line["completion_tokens"], line["failovers"]) == ("stop", 12, 0)
    assert line["preemptions"] == 0
    assert line["engine"].startswith("127.0.0.1:")
    assert (line["method"], line["code"]) == ("HttpCompletions", "OK")


def test_a_flood_of_slow_requests_does_not_flood_the_log(stack: HttpStack) -> None:
    before = [sum(line["event"] == "slow_request" for line in lines(each)) for each in (stack.tokenizer, stack.engine)]
    count = 2 * BURST + 40
    together([lambda: stack.post(COMPLETIONS, HELLO | {"max_tokens": 1}).raise_for_status()] * count)
    stack.until_idle(10.0)
    for service, earlier in zip((stack.tokenizer, stack.engine), before, strict=True):
        told = sum(line["event"] == "slow_request" for line in lines(service)) - earlier
        assert 0 < told < count
