"""`tokenwire top` and GetStatus: under load, idle and away; real services, simulated engine, real sockets."""

import asyncio
import json
import os
import pty
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine_service.simulated.step_model import StepModel
from tests.fixtures import fake_engine as fe
from tests.fixtures.stack import Stack, running_stack, until
from tests.fixtures.tokenizer_app import default_model, eventually, failure, ids_request, running
from tokenizer_service.app import TokenizerApp
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire.tokenizer.v1 import tokenizer_pb2_grpc
from tokenwire_client import AsyncClient, Sampling

WAIT_S = 60


async def tokenwire(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "tokenwire_client.cli", *arguments]
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE, env=environment)
    out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    return process.returncode or 0, out.decode(), err.decode()


@asynccontextmanager
async def operator(app: TokenizerApp) -> AsyncIterator["tokenizer_pb2_grpc.OperatorServiceAsyncStub"]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{app.operator_port}") as channel:
        yield tokenizer_pb2_grpc.OperatorServiceStub(channel)


async def frame(target: str) -> Any:
    code, out, err = await tokenwire("top", "--operator", target, "--once", "--json", "--interval", "0.5")
    assert (code, err) == (0, "")
    return json.loads(out)


async def test_the_command_shows_streams_while_they_run_and_nothing_after(tmp_path: Path) -> None:
    """What it says of an engine agrees with the engine's own answer and with what the clients were given."""
    StepModel(0.02, 0.0, 0.0, 0.0, 0.0).save(tmp_path / "step.json", {})
    flags = ("--simulate", str(tmp_path / "step.json"), "--num-blocks", "400", "--block-size", "16")
    async with running_stack(
        "smollm2-135m-instruct", tmp_path / "logs", engine_flags=flags, tokenizer_flags=("--operator-port", "0")
    ) as stack:
        target = f"127.0.0.1:{await stack.tokenizer.port('operator_port')}"
        async with AsyncClient(stack.target) as client:
            await _streams(stack, client, target)
        idle = await frame(target)
        load = await stack.load()
        figures = idle["status"]["engines"][0]["figures"]
        assert (figures["running_requests"], figures["used_blocks"], idle["status"]["requests"]) == (0, 0, [])
        assert idle["status"]["service"]["active_requests"] == 0
        assert idle["generated_tokens_per_second"] == 0
        assert figures["generated_tokens_total"] == load.generated_tokens_total
        assert figures["steps_total"] == load.steps_total
        assert sum(idle["status"]["service"]["routed_requests_total"].values()) == 3
        await _live_view(stack, target)


async def _streams(stack: Stack, client: AsyncClient, target: str) -> None:
    sampling = Sampling(max_tokens=3000, ignore_eos=True, seed=1)
    given = [0, 0, 0]

    async def read(number: int) -> None:
        async with client.generate("Hello", sampling, request_id=f"stream-{number}") as stream:
            async for delta in stream:
                given[number] += len(delta.token_ids)

    readers = []
    for number in range(3):
        readers.append(asyncio.create_task(read(number)))
        await until(lambda: given[len(readers) - 1] > 5, WAIT_S)
    before = list(given)
    shown = await frame(target)
    after = list(given)
    requests = shown["status"]["requests"]
    assert [each["request_id"] for each in requests] == ["stream-0", "stream-1", "stream-2"]
    for number, each in enumerate(requests):
        assert (each["state"], each["engines"], each["method"]) == ("generating", [stack.engine_target], "Generate")
        assert before[number] <= each["generated_tokens"] <= after[number] + 50
        assert 0 < each["time_to_first_token"] < each["age"]
    (engine,) = shown["status"]["engines"]
    assert (engine["engine"]["address"], engine["engine"]["state"]) == (stack.engine_target, "connected")
    assert engine["figures"]["running_requests"] == 3
    rates = shown["rates"][stack.engine_target]
    assert rates["step_ms"] >= 20
    assert rates["tokens_per_step"] == pytest.approx(3, abs=0.2)
    assert shown["generated_tokens_per_second"] == pytest.approx(3 * rates["steps_per_second"], rel=0.1)
    code, text, _ = await tokenwire("top", "--operator", target, "--once", "--interval", "0.2", "--requests", "2")
    assert code == 0
    for word in ("stream-0", "stream-1", "and 1 more", stack.engine_target, "connected"):
        assert word in text
    assert "stream-2" not in text
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    await stack.until_idle(10.0)


async def _live_view(stack: Stack, target: str) -> None:
    """On a terminal until q is pressed; the service dies meanwhile, which is said and is no end."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tokenwire_client.cli", "top", "--operator", target, "--interval", "0.1"]
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "150", "LINES": "40", "TOKENWIRE_OPERATOR": ""}
    process = await asyncio.create_subprocess_exec(
        *command, "--timeout", "1", stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    seen = bytearray()
    loop = asyncio.get_running_loop()
    loop.add_reader(ours, lambda: seen.extend(_read(ours)))
    try:
        await until(lambda: b"idle" in seen and stack.engine_target.encode() in seen, WAIT_S)
        stack.tokenizer.signal(signal.SIGKILL)
        await until(lambda: b"the service is away" in seen, WAIT_S)
        os.write(ours, b"q")
        assert await asyncio.wait_for(process.wait(), WAIT_S) == 0
    finally:
        loop.remove_reader(ours)
        os.close(ours)
        if process.returncode is None:
            process.kill()
            await process.wait()


def _read(end: int) -> bytes:
    try:
        return os.read(end, 65_536)
    except OSError:  # the other end is closed
        return b""


async def test_the_status_names_requests_in_each_state() -> None:
    """Before an engine has said a token, after, and when the engine is lost and no other is there."""
    release = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        await release.wait()
        await request.send([13874])
        await request.wait_cancelled()

    async with (
        running(default_model(), script, operator_port=0, failover_wait=30.0) as service,
        operator(service.app) as stub,
    ):
        call = service.stub.Generate(ids_request([5, 6], request_id="mine", sampling={"max_tokens": 9}))
        await service.engine.wait_until(lambda: len(service.engine.requests) == 1)

        async def status() -> pb.GetStatusResponse:
            return await stub.GetStatus(pb.GetStatusRequest())

        (waiting,) = (await status()).requests
        assert (waiting.request_id, waiting.state, waiting.prompt_tokens) == ("mine", pb.REQUEST_STATE_WAITING, 2)
        assert list(waiting.engines) == [service.engine.address]
        assert not waiting.HasField("time_to_first_token")
        release.set()
        await call.read()
        told = await status()
        (generating,) = told.requests
        assert (generating.state, generating.generated_tokens) == (pb.REQUEST_STATE_GENERATING, 1)
        assert told.service.generated_tokens_total == 1
        assert told.service.active_requests == 1
        await service.engine.stop()
        await eventually(lambda: service.app.fleet.router.num_connected == 0)
        lost = await status()
        assert [(each.state, list(each.engines)) for each in lost.requests] == [(pb.REQUEST_STATE_MOVING, [])]
        assert (lost.engines[0].error, lost.engines[0].HasField("figures")) == ("not connected", False)
        call.cancel()
        await eventually(lambda: service.app.admission.num_active == 0)
        assert list((await status()).requests) == []


async def test_the_number_of_requests_is_bounded_and_the_oldest_come_first() -> None:
    async def script(request: fe.FakeRequest) -> None:
        await request.send([13874])
        await request.wait_cancelled()

    async with running(default_model(), script, operator_port=0) as service, operator(service.app) as stub:
        calls = []
        for number in range(5):
            calls.append(service.stub.Generate(ids_request([5], request_id=f"r{number}")))
            await calls[-1].read()
        three = (await stub.GetStatus(pb.GetStatusRequest(max_requests=3))).requests
        assert [each.request_id for each in three] == ["r0", "r1", "r2"]
        assert not (await stub.GetStatus(pb.GetStatusRequest(max_requests=0))).requests
        error = await failure(stub.GetStatus(pb.GetStatusRequest(max_requests=1001)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "max_requests: 1,001 is not between 0 and 1,000"
        for call in calls:
            call.cancel()


async def test_clients_are_not_told() -> None:
    """The clients' port does not know the call; the command says so and does not ask again."""

    async def script(request: fe.FakeRequest) -> None:
        await request.play([13874], eos=2)

    async with running(default_model(), script) as service:
        client_port = tokenizer_pb2_grpc.OperatorServiceStub(service.channel)
        error = await failure(client_port.GetStatus(pb.GetStatusRequest()))
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        code, out, err = await tokenwire("top", "--operator", f"127.0.0.1:{service.app.port}")
        assert (code, out) == (1, "")
        assert "unimplemented" in err
    code, out, err = await tokenwire("top", "--operator", f"127.0.0.1:{service.app.port}", "--once", "--timeout", "1")
    assert (code, out, "tokenwire: " in err) == (1, "", True)
