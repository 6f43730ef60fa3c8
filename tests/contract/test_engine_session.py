"""The multiplexed session over real sockets: how it opens, what a message holds, what breaks its rules."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2

from tests.fixtures.engine_calls import (
    details,
    failure,
    open_session,
    read_outputs,
    read_until_finished,
    submit,
    token_request,
    until,
)
from tests.fixtures.scripted_engine import continuation, scripted_service
from tokenwire.common.v1 import outcome_pb2
from tokenwire.engine.v1 import engine_pb2


async def test_session_sends_one_message_per_step_with_all_its_requests() -> None:
    async with scripted_service(gated=True) as service:
        call = await open_session(service)
        for handle in (1, 2, 3):
            await submit(call, handle, token_request([handle, 9], 4))
        await until(lambda: service.handle.num_live == 3)
        service.worker.open_gate()
        finished = await read_until_finished(call, {1, 2, 3})
        for handle in (1, 2, 3):
            tokens, finish = finished[handle]
            assert tokens == continuation([handle, 9], 4)
            assert finish.reason == outcome_pb2.FINISH_REASON_LENGTH
    steps = len(service.worker.plans)
    assert steps <= 6, f"{steps} steps"


async def test_a_step_is_one_message() -> None:
    async with scripted_service(gated=True) as service:
        call = await open_session(service)
        for handle in range(8):
            await submit(call, handle, token_request([handle + 1], 50))
        await until(lambda: service.handle.num_live == 8)
        service.worker.allow(2)
        seen: set[int] = set()
        while len(seen) < 8:
            seen |= {output.handle for output in await read_outputs(call)}
        for _ in range(5):
            service.worker.allow()
            assert len(await read_outputs(call)) == 8


async def test_two_sessions_do_not_see_each_other() -> None:
    """B149: the same handles in two sessions are different requests."""
    async with scripted_service() as service:
        first, second = await open_session(service), await open_session(service)
        await submit(first, 1, token_request([10], 8))
        await submit(second, 1, token_request([20], 8))
        assert (await read_until_finished(first, {1}))[1][0] == continuation([10], 8)
        assert (await read_until_finished(second, {1}))[1][0] == continuation([20], 8)


async def test_session_opened_tells_the_model_and_the_epoch() -> None:
    async with scripted_service() as service:
        call = service.stub.Session()
        await call.write(engine_pb2.SessionRequest(open=engine_pb2.OpenSession()))
        message = await call.read()
        assert isinstance(message, engine_pb2.SessionResponse)
        info = await service.stub.GetModelInfo(engine_pb2.GetModelInfoRequest())
        assert message.opened.model == info
        assert message.opened.engine_epoch == "epoch-1"
    assert (info.model_name, info.vocab_size, info.max_model_len) == ("scripted", 512, 512)
    assert (info.block_size, info.num_blocks, info.max_num_requests) == (4, 256, 16)


@pytest.mark.parametrize(
    ("first", "field"),
    [
        (engine_pb2.SessionRequest(), "open"),
        (engine_pb2.SessionRequest(cancel=engine_pb2.CancelRequest(handle=1)), "open"),
        (engine_pb2.SessionRequest(submit=engine_pb2.SubmitRequest(handle=1)), "open"),
    ],
    ids=["nothing", "cancel", "submit"],
)
async def test_first_message_must_open(first: engine_pb2.SessionRequest, field: str) -> None:
    async with scripted_service() as service:
        call = service.stub.Session()
        await call.write(first)
        error = await failure(call)
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    (bad,) = details(error, error_details_pb2.BadRequest)
    assert bad.field_violations[0].field == field  # type: ignore[attr-defined]


async def test_session_that_never_says_anything_is_ended() -> None:
    async with scripted_service(session_open_timeout_s=0.1) as service:
        error = await failure(service.stub.Session())
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "0.1 s" in str(error.details())


async def test_draining_is_told_to_open_sessions() -> None:
    async with scripted_service() as service:
        call = service.stub.Session()
        await call.write(engine_pb2.SessionRequest(open=engine_pb2.OpenSession()))
        opened = await call.read()
        assert isinstance(opened, engine_pb2.SessionResponse)
        assert opened.HasField("opened")
        service.handle.drain()
        told = await asyncio.wait_for(call.read(), 5)
        assert isinstance(told, engine_pb2.SessionResponse)
        assert told.HasField("draining")
        call.cancel()


async def test_stream_that_ends_before_it_opens() -> None:
    async with scripted_service() as service:
        call = service.stub.Session()
        await call.done_writing()
        assert (await failure(call)).code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    "breach",
    [
        engine_pb2.SessionRequest.FromString(b"\x7a\x00"),  # field 15, which there is not
        engine_pb2.SessionRequest(open=engine_pb2.OpenSession()),
        engine_pb2.SessionRequest(submit=engine_pb2.SubmitRequest(handle=1, request=token_request([4], 5))),
    ],
    ids=["unknown-command", "second-open", "live-handle"],
)
async def test_breach_of_the_stream_ends_it_and_its_requests(breach: engine_pb2.SessionRequest) -> None:
    async with scripted_service(gated=True) as service:
        call = await open_session(service)
        await submit(call, 1, token_request([3], 100))
        await until(lambda: service.handle.num_live == 1)
        await call.write(breach)
        error = await failure(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        service.worker.open_gate()
        await until(lambda: service.handle.num_live == 0)


async def test_a_handle_may_be_used_again_once_its_finish_was_sent() -> None:
    async with scripted_service() as service:
        call = await open_session(service)
        for prompt in ([3], [4]):
            await submit(call, 1, token_request(prompt, 3))
            assert (await read_until_finished(call, {1}))[1][0] == continuation(prompt, 3)
