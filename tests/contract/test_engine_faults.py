"""A worker that fails one request, hangs or loses its device; and the watchdog's judgement of late steps."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine_service.api.vitals import VitalLimits
from engine_service.api.watchdog import Watchdog
from tests.fixtures.checkpoints import write_hist
from tests.fixtures.engine_process import EngineProcess, started_engine
from tests.fixtures.faulty_engine import HANGS, IS_SICK, LOSES_DEVICE
from tests.fixtures.scripted_engine import ScriptedService, scripted_service
from tests.fixtures.trace_format import check_trace, track
from tokenwire.common.v1 import sampling_pb2
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

FAULTY = "tests.fixtures.faulty_engine"


@pytest.fixture(scope="module")
def hist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("checkpoints") / "hist")


@asynccontextmanager
async def connected(engine: EngineProcess) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(engine.address) as channel:
        yield engine_pb2_grpc.EngineServiceStub(channel)


def generate(stub: Any, prompt: list[int], max_tokens: int) -> Any:
    sampling = sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    request = engine_pb2.TokenRequest(prompt_token_ids=prompt, sampling=sampling)
    return stub.Generate(engine_pb2.GenerateRequest(request=request))


async def tokens_of(call: Any) -> int:
    return sum([len(message.token_ids) async for message in call])


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokens_of(call)
    return caught.value.code()


async def test_a_sick_request_ends_alone_and_a_hung_step_ends_the_engine(hist: Path, tmp_path: Path) -> None:
    """Stacks are in the log, steps in a folder; streams end with UNAVAILABLE, the service exits with 1 and says why."""
    with started_engine(hist, "--hung-step-timeout=1", f"--step-dump-folder={tmp_path}", module=FAULTY) as engine:
        async with connected(engine) as stub:
            neighbour = asyncio.create_task(tokens_of(generate(stub, [5], 300)))
            assert await code_of(generate(stub, [IS_SICK], 5)) is grpc.StatusCode.INTERNAL
            assert await neighbour == 300
            running = asyncio.create_task(code_of(generate(stub, [5], 3000)))
            assert await code_of(generate(stub, [HANGS], 5)) is grpc.StatusCode.UNAVAILABLE
            assert await running is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(engine.wait_exit, 10.0) == 1
    assert engine.lines[-1].startswith("tokenwire-engine: the engine hangs: it holds work and has finished no step")
    assert any("in hang_on_purpose" in line for line in engine.lines), "\n".join(engine.lines)
    (file,) = tmp_path.glob("steps-*.json")
    trace = json.loads(file.read_text())
    check_trace(trace)
    last = track(trace, "engine", "worker")[-1]
    assert last["name"].endswith("(unfinished)")
    assert last["dur"] > 900_000  # it hung for a second and more


@pytest.mark.slow
async def test_a_lost_device_ends_the_service(hist: Path) -> None:
    with started_engine(hist, module=FAULTY) as engine:
        async with connected(engine) as stub:
            running = asyncio.create_task(code_of(generate(stub, [5], 3000)))
            assert await code_of(generate(stub, [LOSES_DEVICE], 5)) is grpc.StatusCode.UNAVAILABLE
            assert await running is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(engine.wait_exit, 10.0) == 1
    assert engine.lines[-1] == "tokenwire-engine: the engine failed: OutOfMemoryError"


@pytest.mark.slow
async def test_a_stopped_engine_process_is_replaced(hist: Path) -> None:
    """SIGSTOP: it can write no stacks and take no command, and is replaced all the same."""
    with started_engine(hist, "--hung-step-timeout=0.5", "--restart-engine") as engine:
        async with connected(engine) as stub:
            call = aiter(generate(stub, [5], 3900))
            await anext(call)
            os.kill(engine.engine_pid, signal.SIGSTOP)
            assert await code_of(call) is grpc.StatusCode.UNAVAILABLE
            await asyncio.to_thread(engine.wait_event, "engine ready", 60.0, 1)
            assert await tokens_of(generate(stub, [5], 3)) == 3


@asynccontextmanager
async def watched(service: ScriptedService, timeout_s: float) -> AsyncIterator[asyncio.Event]:
    """A watchdog over a scripted engine, which cannot be killed; the event: it would have been."""
    ended = asyncio.Event()

    async def end_engine(_reason: str) -> None:
        ended.set()
        await asyncio.Event().wait()

    async def set_serving(_is_serving: bool) -> None:
        return

    watchdog = Watchdog(service.vitals, timeout_s=timeout_s, set_serving=set_serving, end_engine=end_engine)
    task = asyncio.create_task(watchdog.run())
    try:
        yield ended
    finally:
        task.cancel()


async def test_a_step_that_does_not_end_is_a_hang_and_an_idle_engine_is_none() -> None:
    async with scripted_service(gated=True) as service, watched(service, 0.05) as ended:
        await asyncio.sleep(0.2)  # the time in which nothing must happen
        assert not ended.is_set()
        call = generate(service.stub, [5], 3)
        await asyncio.wait_for(ended.wait(), 5)
        call.cancel()


async def test_steps_that_keep_coming_are_no_hang_however_long_the_request() -> None:
    async with scripted_service(gated=True) as service, watched(service, 0.3) as ended:
        call = generate(service.stub, [5], 20)
        for _ in range(20):
            service.worker.allow()
            await asyncio.sleep(0.03)  # a slow step
        assert await tokens_of(call) == 20
        assert not ended.is_set()


async def test_work_that_is_not_in_the_queue_is_no_hang() -> None:
    """A live request without a step, while the loop answers that it has nothing to compute (a grammar compiles)."""
    limits = VitalLimits(stall_s=0.0)
    async with scripted_service(gated=True, vital_limits=limits) as service:
        call = generate(service.stub, [5], 2)
        async with asyncio.timeout(5):
            while not service.worker.plans:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert service.vitals.stalled_s > 0
        assert await service.vitals.is_stuck(0.05)
        service.worker.open_gate()
        await tokens_of(call)
        service.handle._live[0] = object()  # type: ignore[assignment]  # known to the front alone
        try:
            assert service.vitals.stalled_s > 0
            assert not await service.vitals.is_stuck(5.0)
        finally:
            del service.handle._live[0]
