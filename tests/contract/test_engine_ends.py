"""Requests that end early: cancelled, aborted, past their deadline, read too slowly. Nothing of them is left."""

import asyncio

import grpc
import pytest

from tests.fixtures.engine_calls import (
    WAIT_S,
    cancel,
    collect,
    failure,
    generate_request,
    open_session,
    read_outputs,
    read_until_finished,
    slow_steps,
    submit,
    token_request,
    until,
)
from tests.fixtures.scripted_engine import continuation, scripted_service
from tokenwire.common.v1 import outcome_pb2
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc


async def test_cancelled_call_frees_its_blocks() -> None:
    """B044: also while the handler waits for the engine; its task is gone afterwards."""
    async with scripted_service(gated=True) as service:
        tasks = len(asyncio.all_tasks())
        call = service.stub.Generate(generate_request([3, 4], 400))
        async with slow_steps(service):
            await call.read()
            call.cancel()
            await until(lambda: service.handle.num_live == 0)
        await until(lambda: service.metric("running_requests") == 0)
        assert service.metric("kv_blocks", state="used") == 0
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert service.metric("requests_total", outcome="abort", code="cancelled") == 1


async def test_many_cancels_at_random_points_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """B041, B043, B123: no slot leaks, no error lines, and full concurrency afterwards."""
    async with scripted_service(max_num_requests=16) as service:

        async def one(index: int) -> None:
            call = service.stub.Generate(generate_request([1 + index % 500], 200))
            for _ in range(index % 5):
                await call.read()
            call.cancel()

        for start in range(0, 200, 20):
            await asyncio.gather(*(one(index) for index in range(start, start + 20)))
        await until(lambda: service.handle.num_live == 0)
        results = await asyncio.gather(
            *(collect(service.stub.Generate(generate_request([index], 30))) for index in range(1, 17))
        )
        assert [tokens for tokens, _ in results] == [continuation([index], 30) for index in range(1, 17)]
        await until(lambda: service.metric("kv_blocks", state="used") == 0)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("style", ["cancel", "half-close", "close"])
async def test_the_end_of_a_session_ends_its_requests(style: str) -> None:
    async with scripted_service(gated=True) as service:
        call = await open_session(service)
        for handle in range(5):
            await submit(call, handle, token_request([handle + 1], 300))
        await until(lambda: service.handle.num_live == 5)
        if style == "cancel":
            call.cancel()
        elif style == "half-close":
            await call.done_writing()
            assert await call.read() is grpc.aio.EOF
            assert await call.code() is grpc.StatusCode.OK
        else:
            await service.channel.close()
        service.worker.open_gate()
        await until(lambda: service.handle.num_live == 0)
        await until(lambda: service.metric("kv_blocks", state="used") == 0)


async def test_sessions_cut_in_mid_stream_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """B041, B123: whatever the moment, no error line, no live request, no task."""
    async with scripted_service() as service:
        tasks = len(asyncio.all_tasks())
        for index in range(30):
            call = await open_session(service)
            for handle in range(4):
                await submit(call, handle, token_request([handle + 1], 450))
            for _ in range(index % 4):
                await read_outputs(call)
            call.cancel()
        await until(lambda: service.handle.num_live == 0)
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        await until(lambda: service.metric("kv_blocks", state="used") == 0)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def test_cancel_in_a_session() -> None:
    async with scripted_service(gated=True) as service:
        call = await open_session(service)
        await submit(call, 1, token_request([1], 300))
        await submit(call, 2, token_request([2], 20))
        await until(lambda: service.handle.num_live == 2)
        for handle in (1, 1, 99):
            await cancel(call, handle)
        async with slow_steps(service):
            finished = await read_until_finished(call, {1, 2})
        tokens, finish = finished[1]
        assert (finish.reason, finish.error.grpc_code) == (outcome_pb2.FINISH_REASON_ABORT, 1)
        assert finish.usage.completion_tokens == len(tokens)
        assert finished[2][0] == continuation([2], 20)


async def test_abort_table() -> None:
    """B038, B039: unknown, twice, finished and 256 at once; after the answer no token of that id appears."""
    async with scripted_service(gated=True, max_waiting_requests=300) as service:
        aborted = service.stub.Generate(generate_request([1], 400, request_id="long"))
        other = service.stub.Generate(generate_request([2], 30, request_id="other"))
        await until(lambda: service.handle.num_live == 2)
        names = ["long", "long", "nobody", *(f"x{i}" for i in range(256))]
        async with slow_steps(service):
            received = list((await aborted.read()).token_ids)  # type: ignore[union-attr]
            await asyncio.wait_for(service.stub.Abort(engine_pb2.AbortRequest(request_ids=names)), WAIT_S)
            assert (await failure(aborted, received)).code() is grpc.StatusCode.CANCELLED
        assert received == continuation([1], 400)[: len(received)]
        await service.stub.Abort(engine_pb2.AbortRequest(request_ids=["long", "other", ""]))
        await service.stub.Abort(engine_pb2.AbortRequest())
        assert (await service.stub.GetLoad(engine_pb2.GetLoadRequest())).running_requests == 0
        other.cancel()


async def test_abort_256_at_once() -> None:
    """B038: running and waiting ones; the engine goes on."""
    async with scripted_service(gated=True, max_waiting_requests=300) as service:
        names = [f"r{i}" for i in range(256)]
        calls = [service.stub.Generate(generate_request([i + 1], 400, name)) for i, name in enumerate(names)]
        await until(lambda: service.handle.num_live == 256)
        async with slow_steps(service):
            await asyncio.wait_for(service.stub.Abort(engine_pb2.AbortRequest(request_ids=names)), WAIT_S)
        assert service.handle.num_live == 0
        assert {(await failure(call)).code() for call in calls} == {grpc.StatusCode.CANCELLED}
        assert (await collect(service.stub.Generate(generate_request([9], 3))))[0] == continuation([9], 3)
        await until(lambda: service.metric("kv_blocks", state="used") == 0)


@pytest.mark.parametrize("how", ["field", "call"])
async def test_deadline_ends_the_request(how: str) -> None:
    async with scripted_service(gated=True) as service:
        if how == "field":
            call = service.stub.Generate(generate_request([1], 400, timeout_s=0.1))
        else:
            call = service.stub.Generate(generate_request([1], 400), timeout=0.1)
        await asyncio.sleep(0.15)  # lets the deadline itself pass
        service.worker.open_gate()
        error = await failure(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: service.handle.num_live == 0)
        await until(lambda: service.metric("kv_blocks", state="used") == 0)


async def test_waiting_request_expires_without_a_step() -> None:
    """B035: it is never computed, and the idle loop wakes for its deadline."""
    async with scripted_service(gated=True, max_num_requests=1) as service:
        running = service.stub.Generate(generate_request([1], 5))
        await until(lambda: bool(service.worker.plans))
        expired = service.stub.Generate(generate_request([2] * 30, 5, timeout_s=0.0))
        await until(lambda: service.handle.num_live == 2)
        service.worker.open_gate()
        assert (await failure(expired)).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert (await collect(running))[0] == continuation([1], 5)
        assert service.metric("prompt_tokens_total") == 1


async def test_slow_session_reader_is_merged_and_then_cut() -> None:
    """Unread tokens are merged per request; past the limit its request ends, and other clients are served."""
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with (
        scripted_service(
            gated=True, max_unread_tokens=50, num_blocks=4000, max_model_len=900, max_num_requests=32
        ) as service,
        grpc.aio.insecure_channel(service.address, options=small_window) as channel,
    ):
        call = await open_session(service, engine_pb2_grpc.EngineServiceStub(channel))
        handles = set(range(1, 31))
        for handle in handles:
            await submit(call, handle, token_request([handle], 800))
        await until(lambda: service.handle.num_live == 30)
        service.worker.open_gate()
        # Nothing of the session is read, yet another client is served at once.
        other = await collect(service.stub.Generate(generate_request([500], 50)))
        assert other[0] == continuation([500], 50)
        await until(lambda: service.handle.num_live == 0)
        finished = await read_until_finished(call, handles)
        reasons = {finish.reason for _, finish in finished.values()}
        assert outcome_pb2.FINISH_REASON_ABORT in reasons
        for handle, (tokens, finish) in finished.items():
            assert tokens == continuation([handle], 800)[: len(tokens)]
            assert finish.usage.completion_tokens == len(tokens)
            if finish.reason == outcome_pb2.FINISH_REASON_ABORT:
                assert finish.error.grpc_code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
                assert "50" in finish.error.message


async def test_slow_generate_reader_is_cut() -> None:
    small_window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]
    async with (
        scripted_service(
            gated=True, max_unread_tokens=20, num_blocks=9000, max_model_len=30_000, max_waiting_tokens=99_999
        ) as service,
        grpc.aio.insecure_channel(service.address, options=small_window) as channel,
    ):
        call = engine_pb2_grpc.EngineServiceStub(channel).Generate(generate_request([1], 25_000))
        await until(lambda: service.handle.num_live == 1)
        service.worker.open_gate()
        await until(lambda: service.handle.num_live == 0)
        error = await failure(call)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert service.metric("requests_total", outcome="abort", code="slow_reader") == 1
