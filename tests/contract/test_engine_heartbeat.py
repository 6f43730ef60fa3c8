"""Heartbeats of a session, over real sockets: a silent client loses its requests, one that is only quiet does not."""

import asyncio

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2

from tests.fixtures.engine_calls import (
    Session,
    details,
    failure,
    read_until_finished,
    submit,
    token_request,
    until,
)
from tests.fixtures.scripted_engine import ScriptedService, continuation, scripted_service
from tokenwire.engine.v1 import engine_pb2

BEAT_S = 0.1
BEATS = 8  # more than twice what a silent client gets


async def open_session(service: ScriptedService, heartbeat: Duration | None) -> Session:
    call = service.stub.Session()
    await call.write(engine_pb2.SessionRequest(open=engine_pb2.OpenSession(heartbeat=heartbeat)))
    return call


async def until_opened(call: Session) -> Session:
    answer = await call.read()
    assert isinstance(answer, engine_pb2.SessionResponse)
    assert answer.opened.takes_heartbeats
    return call


def beat(seconds: float = BEAT_S) -> Duration:
    return Duration(seconds=int(seconds), nanos=round(seconds % 1 * 1e9))


@pytest.mark.parametrize(
    ("heartbeat", "number"),
    [
        (Duration(nanos=99_999_999), "99,999,999 ns"),
        (Duration(), "0 s"),
        (Duration(seconds=-1), "-1 s"),
        (Duration(seconds=3600, nanos=1), "3,600 s and 1 ns"),
        (Duration(seconds=1 << 62), "4,611,686,018,427,387,904 s"),
        (Duration(seconds=1, nanos=-(1 << 31)), "-2,147,483,648 ns"),
    ],
)
async def test_a_senseless_heartbeat_is_refused(heartbeat: Duration, number: str) -> None:
    async with scripted_service() as service:
        error = await failure(await open_session(service, heartbeat))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert all(part in str(error.details()) for part in (number, "between 0.1 and 3,600 s"))
    (bad,) = details(error, error_details_pb2.BadRequest)
    assert bad.field_violations[0].field == "open.heartbeat"  # type: ignore[attr-defined]


@pytest.mark.parametrize("heartbeat", [Duration(nanos=100_000_000), Duration(seconds=3600)])
async def test_the_bounds_are_taken(heartbeat: Duration) -> None:
    async with scripted_service() as service:
        (await until_opened(await open_session(service, heartbeat))).cancel()


async def test_a_silent_client_loses_its_requests() -> None:
    async with scripted_service(gated=True) as service:
        call = await until_opened(await open_session(service, beat()))
        for handle in range(3):
            await submit(call, handle, token_request([handle + 1], 300))
        await until(lambda: service.handle.num_live == 3)
        error = await failure(call)
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert all(part in str(error.details()) for part in ("0.3 s", "0.1 s"))
        service.worker.open_gate()
        await until(lambda: service.handle.num_live == 0)
        await until(lambda: service.metric("kv_blocks", state="used") == 0)


async def test_a_quiet_client_that_keeps_its_promise_is_served() -> None:
    """Nothing happens in its session but heartbeats; then its request ends as always."""
    async with scripted_service(gated=True) as service:
        call = await until_opened(await open_session(service, beat()))
        await submit(call, 1, token_request([3], 4))
        for _ in range(BEATS):
            await asyncio.sleep(BEAT_S)
            await call.write(engine_pb2.SessionRequest())
        service.worker.open_gate()
        assert (await read_until_finished(call, {1}))[1][0] == continuation([3], 4)


async def test_a_client_without_a_promise_may_be_silent() -> None:
    async with scripted_service() as service:
        call = await until_opened(await open_session(service, None))
        await asyncio.sleep(BEATS * BEAT_S)
        await call.write(engine_pb2.SessionRequest())  # a heartbeat is never a mistake
        await submit(call, 1, token_request([3], 4))
        assert (await read_until_finished(call, {1}))[1][0] == continuation([3], 4)
