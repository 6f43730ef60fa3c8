"""The tokenizer service as a process: start, ports, flags, and how it stops."""

import asyncio
import signal
import socket
import sys
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fixtures import fake_engine as fe
from tests.fixtures.tokenizer_app import collect, default_model, failure, ids_request, model_info
from tests.fixtures.tokenizer_process import TokenizerProcess, tokenizer_process
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire.tokenizer.v1 import tokenizer_pb2_grpc
from tokenwire_client import InvalidRequest
from tokenwire_client.operator import Operator

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@asynccontextmanager
async def running(
    script: fe.Script, *arguments: str
) -> AsyncIterator[tuple[fe.FakeEngine, TokenizerProcess, grpc.aio.Channel, int]]:
    """A FAKE-ENGINE, the process, a channel to it, and its metrics port; the service is SERVING."""
    engine = fe.FakeEngine(model_info(default_model()), script)
    await engine.start()
    try:
        async with tokenizer_process("--engine", engine.address, *arguments) as service:
            ports = await service.wait_for_event("listening")
            async with grpc.aio.insecure_channel(f"127.0.0.1:{ports['grpc_port']}") as channel:
                await service.wait_for_event("serving")
                yield engine, service, channel, ports["metrics_port"]
    finally:
        await engine.stop()


async def health(channel: grpc.aio.Channel, name: str = "") -> Any:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status


async def hello(request: fe.FakeRequest) -> None:
    await request.play([19556], eos=2)


def fetch(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text: str = answer.read().decode()
        return text


async def test_serves_and_shows_metrics_and_stops_on_sigterm() -> None:
    async with running(hello) as (_, service, channel, metrics_port):
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        answer = await collect(stub.Generate(ids_request([5], request_id="mine")))
        assert answer.text == "Hello"
        await stub.Tokenize(pb.TokenizeRequest(text="Hello"))
        await stub.Detokenize(pb.DetokenizeRequest(token_ids=[5]))
        await stub.ListModels(pb.ListModelsRequest())
        assert await health(channel, "tokenwire.tokenizer.v1.TokenizerService") == SERVING
        text = await asyncio.to_thread(fetch, metrics_port)
        assert 'tokenwire_tokenizer_requests_total{code="OK",method="Generate"} 1.0' in text
        assert "tokenwire_tokenizer_engines_connected 1.0" in text
        service.process.send_signal(signal.SIGTERM)
        assert await service.wait_exit() == 0
        end, *others = [event for event in service.events if event["event"] == "request_end"]
        assert (end["request_id"], end["code"], end["completion_tokens"]) == ("mine", "OK", 2)
        assert [event["method"] for event in others] == ["Tokenize", "Detokenize", "ListModels"]
        assert len({event["request_id"] for event in others if event["request_id"]}) == 3
        assert service.other_lines == []
        assert {event["level"] for event in service.events} == {"info"}


async def test_ready_to_listen_in_under_three_seconds() -> None:
    """Without torch and transformers; CPU seconds, since other work may share the machine."""
    started = time.monotonic()
    async with tokenizer_process("--engine", "127.0.0.1:1") as service:
        await service.wait_for_event("listening")
        cpu = sum(float(value) for value in _cpu_ticks(service.process.pid)) / 100
    assert min(cpu, time.monotonic() - started) < 3.0


def _cpu_ticks(pid: int) -> list[str]:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rsplit(")", 1)[1].split()[11:13]


async def test_sigterm_lets_running_streams_finish_and_refuses_new_ones() -> None:
    release = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        await request.send([13874])
        await release.wait()
        await request.play([19556], eos=2)

    async with running(script) as (_, service, channel, _port):
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        call = stub.Generate(ids_request([5]))
        await anext(aiter(call))
        service.process.send_signal(signal.SIGTERM)
        await service.wait_for_event("draining")
        assert await health(channel) == NOT_SERVING
        error = await failure(stub.Generate(ids_request([6])))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        release.set()
        assert (await collect(call)).text == "Hello"
        assert await service.wait_exit() == 0


@pytest.mark.parametrize("way", ["grace over", "second signal"])
async def test_streams_that_do_not_finish_end_with_a_status(way: str) -> None:
    """B112: the client sees UNAVAILABLE, never silence; exit code 0."""
    grace = "0.2" if way == "grace over" else "60"
    async with running(fe.until_cancelled, "--drain-timeout", grace) as (engine, service, channel, _port):
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        waiting = asyncio.create_task(failure(stub.Generate(ids_request([5]))))
        await engine.wait_until(lambda: len(engine.requests) == 1)
        service.process.send_signal(signal.SIGTERM)
        if way == "second signal":
            await service.wait_for_event("draining")
            service.process.send_signal(signal.SIGINT)
        error = await asyncio.wait_for(waiting, 10)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert await service.wait_exit() == 0
        await engine.wait_until(lambda: engine.sessions == [])


async def test_an_operators_drain_call_is_a_sigterm_with_a_grace_of_its_own() -> None:
    async with running(fe.until_cancelled, "--operator-port", "0") as (engine, service, channel, _port):
        (ports,) = [event for event in service.events if event["event"] == "listening"]
        stub: Any = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        waiting = asyncio.create_task(failure(stub.Generate(ids_request([5]))))
        await engine.wait_until(lambda: len(engine.requests) == 1)
        with Operator(f"127.0.0.1:{ports['operator_port']}") as operator:
            with pytest.raises(InvalidRequest, match="grace"):
                await asyncio.to_thread(operator.drain, 1e9)
            assert await asyncio.to_thread(operator.drain, 0.3) == 1
        assert await health(channel) == NOT_SERVING
        assert (await asyncio.wait_for(waiting, 10)).code() == grpc.StatusCode.UNAVAILABLE
        assert await service.wait_exit() == 0


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
async def test_a_port_in_use_is_an_error(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        async with tokenizer_process(flag, port) as service:
            assert await service.wait_exit() == 1
    text = "".join(service.other_lines)
    assert f"cannot listen on 127.0.0.1:{port}" in text
    assert "Traceback" not in text


@pytest.mark.parametrize(
    ("arguments", "environment", "code", "words"),
    [
        (("--port", "70000"), {}, 2, "--port"),
        (("--engine", "nowhere"), {}, 2, "--engine"),
        (("--encode-threads", "0"), {}, 2, "--encode-threads"),
        (("--no-such-flag",), {}, 2, "--no-such-flag"),
        ((), {"TOKENWIRE_TOKENIZER_MAX_REQUESTS": "0"}, 2, "--max-requests"),
        ((), {"TOKENWIRE_TOKENIZER_NOPE": "1"}, 2, "TOKENWIRE_TOKENIZER_NOPE"),
        (("--model", "./nothing/here/at/all"), {}, 1, "neither a folder nor"),
        ((), {"TOKENWIRE_CACHE": "/nonexistent"}, 1, "not prepared yet"),
    ],
)
async def test_a_start_that_cannot_succeed_says_why(
    arguments: tuple[str, ...], environment: dict[str, str], code: int, words: str
) -> None:
    async with tokenizer_process(*arguments, environment=environment) as service:
        assert await service.wait_exit() == code
    text = "".join(service.other_lines)
    assert words in text
    assert "Traceback" not in text


async def test_engines_may_be_given_as_a_comma_list_in_the_environment() -> None:
    engines = [fe.FakeEngine(model_info(default_model()), hello) for _ in range(2)]
    for engine in engines:
        await engine.start()
    addresses = ",".join(engine.address for engine in engines)
    async with tokenizer_process(environment={"TOKENWIRE_TOKENIZER_ENGINE": addresses}):
        for engine in engines:
            await engine.wait_until(lambda engine=engine: len(engine.sessions) == 1)  # type: ignore[misc]
    for engine in engines:
        await engine.stop()


def _modules_after(statement: str) -> set[str]:
    import subprocess

    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[0] for name in run.stdout.split()}


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("tokenizer_service.__main__", {"torch", "transformers", "engine_service"}),
        ("tokenizer_service.text.prompt", {"torch", "transformers", "grpc", "google", "tokenwire", "asyncio"}),
        ("tokenizer_service.sessions.text_service", {"torch", "transformers", "prometheus_client"}),
        ("tokenizer_service.sessions.session", {"torch", "transformers", "grpc", "google", "tokenwire"}),
        ("tokenizer_service.sessions.validation", {"torch", "transformers", "grpc", "google", "tokenwire"}),
        ("tokenizer_service.engines.messages", {"torch", "transformers", "grpc", "google", "tokenwire"}),
    ],
)
def test_import_rules(module: str, forbidden: set[str]) -> None:
    assert _modules_after(f"import {module}") & forbidden == set()
