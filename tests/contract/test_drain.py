"""Drain calls, and what the status port says meanwhile: real engine services as processes."""

import asyncio
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fixtures.checkpoints import write_hist
from tests.fixtures.engine_process import EngineProcess, started_engine
from tests.fixtures.scripted_engine import scripted_service
from tokenwire.common.v1 import sampling_pb2
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc


@pytest.fixture(scope="module")
def hist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("checkpoints") / "hist")


@asynccontextmanager
async def connected(engine: EngineProcess) -> AsyncIterator[tuple[grpc.aio.Channel, Any]]:
    async with grpc.aio.insecure_channel(engine.address) as channel:
        yield channel, engine_pb2_grpc.EngineServiceStub(channel)


def generate(stub: Any, max_tokens: int) -> Any:
    sampling = sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    request = engine_pb2.TokenRequest(prompt_token_ids=[1], sampling=sampling)
    return stub.Generate(engine_pb2.GenerateRequest(request=request))


async def tokens_of(call: Any) -> int:
    return sum([len(message.token_ids) async for message in call])


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await (call if not hasattr(call, "__aiter__") else tokens_of(call))
    return caught.value.code()


def page(engine: EngineProcess, path: str) -> tuple[int, str]:
    url = engine.metrics_url.replace("/metrics", path)
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


async def test_a_drain_call_is_a_sigterm(hist: Path) -> None:
    """Levels of health and the status port before and meanwhile; running work finishes; exit code 0."""
    with started_engine(hist, "--allow-drain-rpc") as engine:
        async with connected(engine) as (channel, stub):
            health = health_pb2_grpc.HealthStub(channel)

            async def level(name: str) -> Any:
                return (await health.Check(health_pb2.HealthCheckRequest(service=name))).status

            assert [await level(name) for name in ("", "live", "loop", "model")] == [1, 1, 1, 1]
            assert (page(engine, "/livez"), page(engine, "/readyz")) == ((200, "ok\n"), (200, "ok\n"))
            running = aiter(generate(stub, 1500))
            first = await anext(running)
            answer = await stub.Drain(engine_pb2.DrainRequest())
            assert answer.live_requests == 1
            assert [await level(name) for name in ("", "live", "loop", "model")] == [2, 1, 1, 1]
            assert (page(engine, "/livez")[0], page(engine, "/readyz")) == (200, (503, "not ready\n"))
            assert "tokenwire_engine_up 1.0" in page(engine, "/metrics")[1]
            assert await code_of(generate(stub, 3)) is grpc.StatusCode.UNAVAILABLE
            assert len(first.token_ids) + await tokens_of(running) == 1500
        assert await asyncio.to_thread(engine.wait_exit, 10.0) == 0


@pytest.mark.slow
async def test_at_the_end_of_its_grace_a_drain_ends_what_runs_with_unavailable(hist: Path) -> None:
    with started_engine(hist, "--allow-drain-rpc", "--drain-timeout=3600") as engine:
        async with connected(engine) as (_, stub):
            running = aiter(generate(stub, 4000))
            await anext(running)
            began = time.monotonic()
            await stub.Drain(engine_pb2.DrainRequest(grace=Duration(nanos=200_000_000)))
            assert await code_of(running) is grpc.StatusCode.UNAVAILABLE
            assert await asyncio.to_thread(engine.wait_exit, 10.0) == 0
            assert time.monotonic() - began < 5.0


async def test_a_drain_call_is_refused_unless_it_was_allowed() -> None:
    async with scripted_service() as service:
        assert await code_of(service.stub.Drain(engine_pb2.DrainRequest())) is grpc.StatusCode.PERMISSION_DENIED
        assert not service.handle.is_draining


@pytest.mark.parametrize(
    "grace", [Duration(seconds=-1), Duration(seconds=86_401), Duration(nanos=-1), Duration(nanos=2_000_000_000)]
)
async def test_a_senseless_grace_is_the_callers_mistake(grace: Duration) -> None:
    asked: list[float | None] = []
    async with scripted_service(ask_to_drain=asked.append) as service:
        call = service.stub.Drain(engine_pb2.DrainRequest(grace=grace))
        assert await code_of(call) is grpc.StatusCode.INVALID_ARGUMENT
    assert asked == []
