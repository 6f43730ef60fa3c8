"""The real engine service as processes over sockets, on HIST: exact tokens, stops and deaths."""

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fixtures.checkpoints import greedy_of, load_reference, write_hist
from tests.fixtures.engine_process import EngineProcess, started_engine
from tests.fixtures.process_calls import (
    SMALLPOOL,
    collect,
    connect,
    failure,
    load_of,
    metric_lines,
    request,
    wait_health,
    wait_idle,
)
from tokenwire.common.v1 import outcome_pb2
from tokenwire.engine.v1 import engine_pb2

RANDOM = random.Random(3)


@pytest.fixture(scope="module")
def hist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("checkpoints") / "hist")


@pytest.fixture(scope="module")
def small_engine(hist: Path) -> Iterator[EngineProcess]:
    with started_engine(hist, *SMALLPOOL) as engine:
        yield engine
        assert engine.process.poll() is None


async def check_mixed_requests(engine: EngineProcess, hist: Path) -> None:
    """Batched, chunked, preempted and partly cached: the tokens are those of transformers alone (B046, B072)."""
    reference = load_reference(hist)
    shared = [RANDOM.randrange(1, 512) for _ in range(40)]
    prompts = [
        [*(shared if i % 3 == 0 else []), *(RANDOM.randrange(1, 512) for _ in range(RANDOM.randrange(1, 120)))]
        for i in range(20)
    ]
    async with connect(engine) as (_, stub):
        results = await asyncio.gather(*(collect(stub.Generate(request(prompt, 80))) for prompt in prompts))
        load = await wait_idle(stub, 1.0)
    for prompt, (tokens, finish) in zip(prompts, results, strict=True):
        assert tokens == greedy_of(reference, prompt, 80)
        assert finish.reason == outcome_pb2.FINISH_REASON_LENGTH
        assert finish.usage.prompt_tokens == len(prompt)
        assert finish.usage.completion_tokens == 80
    assert load.preemptions_total > 0
    assert load.free_blocks + load.cached_blocks == load.total_blocks == 64


async def test_mixed_requests_are_exact_under_preemption(small_engine: EngineProcess, hist: Path) -> None:
    await check_mixed_requests(small_engine, hist)


async def test_cancel_deadline_and_session_end_free_the_blocks(small_engine: EngineProcess) -> None:
    async with connect(small_engine) as (_, stub):
        calls = [stub.Generate(request([i + 1] * 20, 900)) for i in range(6)]
        for call in calls:
            await call.read()
            call.cancel()
        await wait_idle(stub, 1.0)
        late = stub.Generate(request([3], 1000, timeout=Duration(nanos=60_000_000)))
        assert (await failure(late)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await wait_idle(stub, 1.0)
        session = stub.Session()
        await session.write(engine_pb2.SessionRequest(open=engine_pb2.OpenSession()))
        for handle in range(5):
            submitted = request([handle + 1], 900).request
            await session.write(
                engine_pb2.SessionRequest(submit=engine_pb2.SubmitRequest(handle=handle, request=submitted))
            )
        await session.read()
        await session.read()
        session.cancel()
        await wait_idle(stub, 1.0)


async def test_queue_full_under_real_load(small_engine: EngineProcess) -> None:
    """Of very many requests at once all are either served exactly or refused with RESOURCE_EXHAUSTED."""
    async with connect(small_engine) as (_, stub):
        calls = [stub.Generate(request([7, 8, 9], 100)) for _ in range(400)]
        results = await asyncio.gather(*(collect(call) for call in calls), return_exceptions=True)
        served = [result[0] for result in results if isinstance(result, tuple)]
        refused = [result.code() for result in results if isinstance(result, grpc.aio.AioRpcError)]
        await wait_idle(stub, 1.0)
    assert len(served) + len(refused) == 400
    assert len(served) >= 64
    assert all(tokens == served[0] and len(tokens) == 100 for tokens in served)
    assert set(refused) == {grpc.StatusCode.RESOURCE_EXHAUSTED}


async def test_health_answers_at_once_while_the_engine_is_busy(small_engine: EngineProcess) -> None:
    async with connect(small_engine) as (channel, stub):
        calls = [asyncio.create_task(collect(stub.Generate(request([i + 1], 150)))) for i in range(64)]
        health = health_pb2_grpc.HealthStub(channel)
        seconds = []
        async with asyncio.timeout(30):
            while (await load_of(stub)).running_requests < 5:
                pass
        for _ in range(20):
            started = time.perf_counter()
            assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
            seconds.append(time.perf_counter() - started)
        assert (await load_of(stub)).running_requests > 0
        await asyncio.gather(*calls)
    assert statistics.median(seconds) < 0.05


async def test_metrics_and_idle_cpu(small_engine: EngineProcess) -> None:
    """B141, B148: gauges at idle, and waiting costs nothing in either process."""
    async with connect(small_engine) as (_, stub):
        await collect(stub.Generate(request([5], 4)))
        load = await wait_idle(stub, 1.0)
    metrics = metric_lines(small_engine)
    assert metrics["tokenwire_engine_up"] == 1
    for gauge in ("running_requests", "waiting_requests", "waiting_tokens", "kv_cache_usage_ratio"):
        assert metrics[f"tokenwire_engine_{gauge}"] == 0
    assert metrics['tokenwire_engine_kv_blocks{state="used"}'] == 0
    assert metrics["tokenwire_engine_generated_tokens_total"] == load.generated_tokens_total
    assert metrics["tokenwire_engine_step_tokens_count"] == load.steps_total

    def cpu_seconds() -> float:
        ticks = 0
        for pid in (small_engine.pid, small_engine.engine_pid):
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            ticks += int(fields[11]) + int(fields[12])
        return ticks / os.sysconf("SC_CLK_TCK")

    before = cpu_seconds()
    await asyncio.sleep(1.5)  # the time that is measured
    assert cpu_seconds() - before < 0.05


async def test_killed_engine_process_ends_streams_and_the_service(hist: Path) -> None:
    """B138: UNAVAILABLE within a second, then a non-zero exit with one plain line. With the overlapped loop."""
    with started_engine(hist, *SMALLPOOL, "--overlap") as engine:
        await check_mixed_requests(engine, hist)
        async with connect(engine) as (_, stub):
            calls = [stub.Generate(request([i + 1], 900)) for i in range(4)]
            session = stub.Session()
            await session.write(engine_pb2.SessionRequest(open=engine_pb2.OpenSession()))
            await session.read()
            for call in calls:
                await call.read()
            killed = time.monotonic()
            os.kill(engine.engine_pid, signal.SIGKILL)
            errors = await asyncio.gather(*(failure(call) for call in [*calls, session]))
            assert time.monotonic() - killed < 1.0
        assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
        assert await asyncio.to_thread(engine.wait_exit, 5.0) == 1
        assert engine.lines[-1] == "tokenwire-engine: the engine process ended unexpectedly"
        assert not any("Traceback" in line for line in engine.lines)


async def test_restart_option_and_immediate_stop(hist: Path) -> None:
    """The service stays, its engine is fresh; and a second signal ends it at once while work runs."""
    with started_engine(hist, "--restart-engine") as engine:
        async with connect(engine) as (channel, stub):
            tokens, _ = await collect(stub.Generate(request([5, 6, 7], 20)))
            call = stub.Generate(request([1], 3000))
            await call.read()
            first_pid = engine.engine_pid
            os.kill(first_pid, signal.SIGKILL)
            assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE
            await wait_health(channel, health_pb2.HealthCheckResponse.NOT_SERVING, 1.0)
            refused = await failure(stub.Generate(request([1], 3)))
            assert refused.code() is grpc.StatusCode.UNAVAILABLE
            await wait_health(channel, health_pb2.HealthCheckResponse.SERVING, 90.0)
            assert (await load_of(stub)).engine_pid == engine.engine_pid != first_pid
            assert (await collect(stub.Generate(request([5, 6, 7], 20))))[0] == tokens
            call = stub.Generate(request([1], 3900))
            await call.read()
            engine.process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(engine.wait_event, "draining")
            engine.process.send_signal(signal.SIGTERM)
            assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(engine.wait_exit, 5.0) == 0


async def test_sigterm_drains(hist: Path) -> None:
    """Health first, no new work, running work finishes, exit status 0, and no process is left."""
    with started_engine(hist) as engine:
        async with connect(engine) as (channel, stub):
            running = stub.Generate(request([1], 400))
            first = await running.read()
            assert isinstance(first, engine_pb2.GenerateResponse)
            session = stub.Session()
            await session.write(engine_pb2.SessionRequest(open=engine_pb2.OpenSession()))
            await session.read()
            engine.process.send_signal(signal.SIGTERM)
            await wait_health(channel, health_pb2.HealthCheckResponse.NOT_SERVING, 5.0)
            refused = await failure(stub.Generate(request([1], 3)))
            assert refused.code() is grpc.StatusCode.UNAVAILABLE
            tokens, finish = await collect(running)
            assert len(first.token_ids) + len(tokens) == finish.usage.completion_tokens == 400
            assert finish.reason == outcome_pb2.FINISH_REASON_LENGTH
            ended = await failure(session)
            assert ended.code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(engine.wait_exit, 10.0) == 0
        with pytest.raises(ProcessLookupError):
            os.kill(engine.engine_pid, 0)


def test_engine_process_dies_with_the_front(hist: Path) -> None:
    engine = EngineProcess(f"--model={hist}")
    try:
        child = int(engine.wait_event("engine starting")["engine_pid"])
        engine.process.send_signal(signal.SIGKILL)
        engine.wait_exit(5.0)
        deadline = time.monotonic() + 10.0
        while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        engine.close()
