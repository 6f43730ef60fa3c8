"""Engines that come and go while requests run: by an operator's word, by DNS. Real sockets."""

import asyncio
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterable

import grpc

from tests.fixtures import fake_engine as fe
from tests.fixtures.tokenizer_app import collect, default_model, eventually, failure, ids_request, model_info, running
from tokenizer_service.app import TokenizerApp
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire.tokenizer.v1 import tokenizer_pb2_grpc


def operator(app: TokenizerApp) -> tuple[grpc.aio.Channel, "tokenizer_pb2_grpc.OperatorServiceAsyncStub"]:
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{app.operator_port}")
    return channel, tokenizer_pb2_grpc.OperatorServiceStub(channel)


async def tokenwire(*arguments: str) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "tokenwire_client.cli", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


async def test_engines_are_added_and_removed_while_streams_run() -> None:
    """None of the streams fails; a removed engine finishes what it has and gets nothing new."""
    release = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        await request.send([13874])
        await release.wait()
        await request.play([19556], eos=2)

    second = fe.FakeEngine(model_info(default_model()), script)
    await second.start()
    async with running(default_model(), script, operator_port=0) as service:
        channel, stub = operator(service.app)
        first = service.engine
        calls = [service.stub.Generate(ids_request([5])) for _ in range(4)]
        await first.wait_until(lambda: len(first.requests) == 4)
        await stub.AddEngine(pb.AddEngineRequest(address=second.address))
        await eventually(lambda: service.app.fleet.router.num_connected == 2)
        await stub.RemoveEngine(pb.RemoveEngineRequest(address=first.address))
        calls += [service.stub.Generate(ids_request([5])) for _ in range(4)]
        await second.wait_until(lambda: len(second.requests) == 4)
        engines = (await stub.ListEngines(pb.ListEnginesRequest())).engines
        assert [(e.address, e.state, list(e.sources), e.live_requests) for e in engines] == [
            (first.address, pb.ENGINE_STATE_LEAVING, [], 4),
            (second.address, pb.ENGINE_STATE_CONNECTED, ["operator"], 4),
        ]
        release.set()
        assert [(await collect(call)).completion.finish_reason for call in calls] == [fe.STOP] * 8
        await first.wait_until(lambda: not first.sessions)
        await eventually(lambda: len(service.app.fleet.replicas.all()) == 1)
        await channel.close()
    await second.stop()


async def test_the_command_lists_adds_and_removes_and_refuses_with_words() -> None:
    async with running(default_model(), fe.until_cancelled, operator_port=0) as service:
        at = ("--operator", f"127.0.0.1:{service.app.operator_port}")
        address = service.engine.address
        heads = "address\tstate\tsources\tlive_requests\n"
        assert await tokenwire("engines", "list", *at) == (0, f"{heads}{address}\tconnected\tstatic\t0\n", "")
        assert await tokenwire("engines", "add", "127.0.0.1:1", *at) == (0, "", "")
        code, out, err = await tokenwire("engines", "add", "127.0.0.1:1", *at)
        assert (code, out, err) == (2, "", "tokenwire: already exists: 127.0.0.1:1 is an engine already (operator)\n")
        code, out, err = await tokenwire("engines", "add", "nonsense", *at)
        assert (code, "'nonsense' is not HOST:PORT" in err) == (2, True)
        assert await tokenwire("engines", "remove", "127.0.0.1:1", *at) == (0, "", "")
        code, out, _ = await tokenwire("engines", "list", "--json", *at)
        assert (code, out.count("address"), f'"{address}"' in out) == (0, 1, True)
        channel, _ = operator(service.app)
        malformed = channel.unary_unary("/tokenwire.tokenizer.v1.OperatorService/AddEngine")(b"\x0a\x01\xff")
        error = await failure(malformed)
        assert (error.code(), "address" in (error.details() or "")) == (grpc.StatusCode.INVALID_ARGUMENT, True)
        await channel.close()
        # Clients' port does not serve operators.
        error = await failure(
            tokenizer_pb2_grpc.OperatorServiceStub(service.channel).ListEngines(pb.ListEnginesRequest())
        )
        assert error.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_engines_behind_a_name_are_found_and_followed() -> None:
    engine = fe.FakeEngine(model_info(default_model()), fe.until_cancelled)
    await engine.start()
    found: list[str] = ["127.0.0.1"]

    async def resolve(name: str, port: int) -> Iterable[str]:
        assert (name, port) == ("engines.test", engine.port)
        return list(found)

    async with running(
        default_model(),
        fe.until_cancelled,
        wait=False,
        engine=("127.0.0.1:1",),
        engine_dns=(f"engines.test:{engine.port}",),
        engine_dns_interval=0.1,
        resolve=resolve,
    ) as service:
        await service.wait_health(True)
        call = service.stub.Generate(ids_request([5]))
        await engine.wait_until(lambda: len(engine.requests) == 1)
        found[:] = ["127.0.0.2"]  # nobody listens there
        await eventually(lambda: service.app.fleet.router.num_connected == 0)
        await service.wait_health(False)
        assert len(engine.sessions) == 1  # the stream goes on
        call.cancel()
        await engine.wait_until(lambda: not engine.sessions)
    await engine.stop()
