"""`tokenwire load` against services on sockets: a scripted one that misbehaves, the real stack over both transports."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import typer
from typer.testing import CliRunner

from tests.fixtures.fake_tokenizer_service import FakeTokenizerService, completion, serving_in_thread
from tests.fixtures.http_stack import HttpStack
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client.load.commands import add_commands

WAIT_S = 30
GROUP = typer.Typer()
add_commands(GROUP)


class UnreliableService(FakeTokenizerService):
    """Of three requests one is answered, one refused, and one ends without its last word."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Any] = []
        self._numbers = itertools.count()

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        number = next(self._numbers)
        self.requests.append(request)
        if number % 3 == 1:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queue of 8 is full")
        yield pb.GenerateResponse(text="a", token_ids=[5])
        if number % 3 == 0:
            yield pb.GenerateResponse(text="b", token_ids=[6], completion=completion(request_id="r"))


@pytest.fixture(scope="module")
def service() -> UnreliableService:
    return UnreliableService()


@pytest.fixture(scope="module")
def target(service: UnreliableService) -> Iterator[str]:
    with serving_in_thread(service) as address:
        yield address


def load(folder: Path, *arguments: str, **environment: str) -> tuple[int, str, dict[str, Any]]:
    """Exit code, all output, and the JSON report ({} if there is none)."""
    outputs = ("--json-file", str(folder / "r.json"), "--html-file", str(folder / "r.html"))
    result = CliRunner().invoke(GROUP, [*arguments, *outputs], env={"COLUMNS": "200", **environment})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    report = json.loads((folder / "r.json").read_text()) if (folder / "r.json").exists() else {}
    return result.exit_code, result.output, report


def test_errors_are_counted_by_their_status(target: str, tmp_path: Path) -> None:
    code, output, report = load(tmp_path, "run", "--target", target, "--rate", "200", "--requests", "30")
    assert code == 0
    counts = report["rounds"][0]["counts"]
    assert (counts["intended"], counts["sent"], counts["ok"]) == (30, 30, 10)
    assert counts["errors"] == {"resource_exhausted": 10, "incomplete_stream": 10}
    assert "error resource_exhausted: 10, as in: queue of 8 is full" in output
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


def test_the_target_of_other_commands_is_that_of_load_tests(target: str, tmp_path: Path) -> None:
    code, _, report = load(tmp_path, "run", "--rate", "500", "--requests", "6", TOKENWIRE_TARGET=target)
    assert code == 0
    assert report["settings"]["target"] == f"grpc {target}"


def test_a_target_of_grpc_is_not_that_of_http(tmp_path: Path) -> None:
    run = ("run", "--kind", "http", "--requests", "1", "--tls")
    code, output, _ = load(tmp_path, *run, TOKENWIRE_TARGET="10.0.0.1:1")
    assert code == 2
    assert "need a target that begins with https://" in output


def test_nothing_is_sent_when_the_report_cannot_be_written(
    service: UnreliableService, target: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    service.requests.clear()
    for command in (("run", "--rate", "9"), ("sweep", "--rates", "9")):
        code, output, _ = load(tmp_path / "file", *command, "--target", target)
        assert code == 2
        assert "cannot write" in output
    assert not service.requests
    code, _, _ = load(tmp_path / "made" / "here", "run", "--target", target, "--rate", "200", "--requests", "3")
    assert code == 0


def test_the_same_seed_sends_the_same_requests(service: UnreliableService, target: str, tmp_path: Path) -> None:
    sent = []
    for _ in range(2):
        service.requests.clear()
        shape = ("--input", "uniform:3,9", "--output", "uniform:2,30", "--prefixes", "2", "--prefix-tokens", "4")
        load(tmp_path, "run", "--target", target, "--rate", "500", "--requests", "12", "--seed", "4", *shape)
        sent.append(sorted((request.text, request.options.sampling.max_tokens) for request in service.requests))
    assert sent[0] == sent[1]
    assert len({text for text, _ in sent[0]}) == 12


def test_tenants_have_their_keys_and_no_report_has_them(target: str, tmp_path: Path) -> None:
    tenants = ("--tenant", "a:3:KEY_A", "--tenant", "b:1:KEY_B")
    arguments = ("run", "--target", target, "--arrivals", "closed", "--concurrency", "4", "--requests", "40", *tenants)
    code, _, report = load(tmp_path, *arguments, KEY_A="sesame-a", KEY_B="sesame-b")
    assert code == 0
    by_name = {tenant["name"]: tenant["counts"]["intended"] for tenant in report["rounds"][0]["tenants"]}
    assert sum(by_name.values()) == 40
    assert by_name["a"] > by_name["b"] > 0
    assert all("sesame" not in (tmp_path / name).read_text() for name in ("r.json", "r.html"))


def test_a_sweep_and_its_comparison_and_its_page_again(target: str, tmp_path: Path) -> None:
    rates = (
        "--rates",
        "20,40",
        "--arrivals",
        "constant",
        "--duration",
        "0.5",
        "--warmup",
        "0.1",
        "--ttft",
        "1",
        "--good-share",
        "0.2",
    )
    code, output, report = load(tmp_path, "sweep", "--target", target, *rates)
    assert code == 0
    assert [each["rate"] for each in report["rounds"]] == [20.0, 40.0]
    assert report["knee"]["rate"] == 40.0
    assert "knee: 40 requests/s (at least 20% of the requests within the targets)" in output
    page = (tmp_path / "r.html").read_text()
    path = str(tmp_path / "r.json")
    again = CliRunner().invoke(GROUP, ["report", path, "--html-file", str(tmp_path / "again.html")])
    assert again.exit_code == 0
    assert (tmp_path / "again.html").read_text() == page
    compared = CliRunner().invoke(GROUP, ["compare", path, path])
    assert "20/s requests/s" in compared.stdout


def test_a_trace_is_replayed(service: UnreliableService, target: str, tmp_path: Path) -> None:
    rows = [{"timestamp": 100 * n, "input_length": 5 + n, "output_length": 2 + n, "hash_ids": []} for n in range(6)]
    (tmp_path / "trace").write_text("\n".join(map(json.dumps, rows)))
    service.requests.clear()
    trace = ("--trace", str(tmp_path / "trace"), "--trace-format", "mooncake", "--time-scale", "10")
    code, _, report = load(tmp_path, "run", "--target", target, "--arrivals", "trace", *trace)
    assert (code, report["rounds"][0]["counts"]["intended"]) == (0, 6)
    lengths = sorted((len(r.text.split()), r.options.sampling.max_tokens) for r in service.requests)
    assert lengths == [(5 + n, 2 + n) for n in range(6)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "--rate", "0"), "rate 0 is outside (0, 100000]"),
        (("run", "--input", "lots"), "'lots' is none of N, uniform:LOW,HIGH"),
        (("run", "--duration", "5", "--warmup", "5"), "a warm-up of 5 s in a run of 5 s"),
        (("run", "--arrivals", "trace"), "arrivals by a trace need --trace"),
        (("run", "--trace", "nowhere.csv"), "cannot read nowhere.csv: No such file or directory"),
        (("run", "--kind", "http", "--target", "127.0.0.1:1"), "must be a URL that begins with http"),
        (("run", "--kind", "grpc", "--target", "http://x"), "must be host:port, got 'http://x'"),
        (("run", "--tenant", "a:1:NOT_SET_ANYWHERE"), "the environment variable NOT_SET_ANYWHERE is not set"),
        (("run", "--tenant", "a"), "'a' is not NAME:WEIGHT:VARIABLE"),
        (("run", "--extra-body", "[]"), "must be a JSON object"),
        (("run", "--extra-body", '{"top_k": 1}'), "an extra body is for targets of kind http"),
        (("run", "--kind", "http", "--target", "http://me:secret@x"), "the target must hold no credentials"),
        (("run", "--kind", "http", "--target", "http://x/v1/"), "must be a URL without /v1"),
        (("run", "--requests", "1", "--warmup", "inf"), "a warm-up of inf s is outside"),
        (("sweep", "--rates", "1,nan"), "at most 200 rates, each above 0"),
        (("run", "--kind", "http", "--target", "http://x", "--tls"), "need a target that begins with https://"),
        (("run", "--arrivals", "closed", "--concurrency", "9", "--max-in-flight", "8"), "9 clients: outside 1 to"),
        (("run", "--time-scale", "0"), "time scale 0 is outside (0, 1000000]"),
        (("run", "--prefixes", "3"), "shared prefixes need both a number and a length"),
        (("sweep", "--arrivals", "closed"), "closed arrivals have no rate to sweep"),
        (("sweep", "--rates", "1,x"), "rates '1,x' are not numbers"),
        (("sweep", "--factor", "1"), "factor 1 is outside (1, 100]"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_sent(
    arguments: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    code, output, report = load(tmp_path, *arguments)
    assert (code, report) == (2, {})
    assert message in " ".join(output.replace("│", " ").split())


def test_nobody_there(tmp_path: Path) -> None:
    closed = ("run", "--arrivals", "closed", "--concurrency", "1", "--requests", "2")
    code, output, report = load(tmp_path, *closed, "--target", "127.0.0.1:1")
    assert code == 1
    assert report["rounds"][0]["counts"]["errors"] == {"unavailable": 2}
    assert "note: No request ended well." in output
    code, output, _ = load(tmp_path, *closed, "--kind", "http", "--target", "http://127.0.0.1:1")
    assert code == 1
    assert "http://127.0.0.1:1/v1/models" in output


class HoldingService(FakeTokenizerService):
    """Never says more than one word."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse(text="a", token_ids=[5])
        self._record("any", request, context)
        await asyncio.Event().wait()


def test_ctrl_c_ends_the_run_and_still_writes_the_report(tmp_path: Path) -> None:
    service = HoldingService()
    with serving_in_thread(service) as address:
        command = [sys.executable, "-m", "tokenwire_client.cli", "load", "run", "--target", address, "--rate", "50"]
        run = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            service.wait_for_calls("any", 5)
            os.kill(run.pid, signal.SIGINT)
            output, errors = run.communicate(timeout=WAIT_S)
        finally:
            run.kill()
            run.wait()
    assert run.returncode == 130, errors
    assert "Traceback" not in errors
    (found,) = json.loads((tmp_path / ".run/load/report.json").read_text())["rounds"]
    counts = found["counts"]
    assert found["interrupted"]
    assert counts["abandoned"] == counts["sent"] == counts["intended"] >= 5
    assert (tmp_path / ".run/load/report.html").exists()
    assert "note: The run was interrupted" in output


def test_both_transports_of_the_real_stack_serve_the_same_workload(succ_http: HttpStack, tmp_path: Path) -> None:
    address = f"127.0.0.1:{asyncio.run(succ_http.tokenizer.port())}"
    url = str(succ_http.client.base_url).rstrip("/")
    load_ = ("--rate", "40", "--requests", "16", "--input", "uniform:5,20", "--output", "uniform:2,8", "--seed", "3")
    found = []
    for kind, where in (("grpc", address), ("http", url)):
        before = succ_http.metric("generated_tokens_total")
        code, output, report = load(tmp_path, "run", "--kind", kind, "--target", where, *load_)
        assert code == 0, output
        (one,) = report["rounds"]
        assert (one["counts"]["ok"], one["tokens"]["without_usage"]) == (16, 0), output
        assert one["tokens"]["prompt"] == one["tokens"]["asked_prompt"]
        assert one["ttft"]["count"] == 16
        assert succ_http.metric("generated_tokens_total") - before == one["tokens"]["completion"]
        found.append((one["tokens"]["prompt"], one["tokens"]["completion"]))
    assert found[0] == found[1]
    succ_http.until_idle()


def test_cancelled_requests_free_the_real_engine(succ_http: HttpStack, tmp_path: Path) -> None:
    address = f"127.0.0.1:{asyncio.run(succ_http.tokenizer.port())}"
    shape = ("--input", "10", "--output", "400", "--cancel-share", "1", "--requests", "8", "--rate", "100")
    code, _, report = load(tmp_path, "run", "--target", address, *shape, "--seed", "5")
    assert code == 0  # not a single one was to end
    assert report["rounds"][0]["counts"]["cancelled"] == 8
    succ_http.until_idle()
