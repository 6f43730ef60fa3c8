"""The engine's load in a session: told when asked for, not too often, and always the last word."""

import asyncio

from tests.fixtures.engine_calls import Session, slow_steps, submit, token_request
from tests.fixtures.scripted_engine import SMALL, ScriptedService, scripted_service
from tokenwire.engine.v1 import engine_pb2

WAIT_S = 10.0


async def open_session(service: ScriptedService) -> Session:
    call = service.stub.Session()
    opening = engine_pb2.OpenSession(client_name="test", tell_load=True)
    await call.write(engine_pb2.SessionRequest(open=opening))
    opened = await call.read()
    assert isinstance(opened, engine_pb2.SessionResponse)
    assert opened.HasField("opened")
    return call


async def next_load(call: Session) -> engine_pb2.EngineLoad:
    async with asyncio.timeout(WAIT_S):
        while isinstance(message := await call.read(), engine_pb2.SessionResponse):
            if message.HasField("load"):
                return message.load
    raise AssertionError(await call.code())


def figures(load: engine_pb2.EngineLoad) -> tuple[int, int, int]:
    return load.running_requests, load.waiting_requests, load.queued_uncached_tokens


async def test_the_load_is_told_at_the_start_with_the_steps_and_at_the_end() -> None:
    """Also of the work of others: what counts is the engine's."""
    async with scripted_service(gated=True, max_num_requests=2) as service:
        call, others = await open_session(service), await open_session(service)
        idle = await next_load(call)
        assert (figures(idle), idle.free_blocks, idle.total_blocks) == ((0, 0, 0), SMALL.num_blocks, SMALL.num_blocks)
        for handle in range(1, 5):
            await submit(others, handle, token_request([5 + handle] * 8, 2))
        service.worker.open_gate()
        told = []
        while not told or figures(told[-1]) != (0, 0, 0):
            told.append(await next_load(call))
        last = told[-1]
        assert last.used_blocks == 0
        assert last.free_blocks + last.cached_blocks == SMALL.num_blocks
        assert last.cached_blocks > 0
        assert len(told) <= 3  # of eight steps and more
        call.cancel()
        others.cancel()
        while service.handle.report_listeners:  # noqa: ASYNC110 (the server's end of the calls)
            await asyncio.sleep(0.01)


async def test_what_waits_is_counted_without_the_share_that_was_cached_lately() -> None:
    async with scripted_service(gated=True, max_num_requests=1, max_waiting_tokens=100_000) as service:
        call = await open_session(service)
        await next_load(call)
        for handle in range(1, 4):
            await submit(call, handle, token_request([5] * 400, 40))
        async with slow_steps(service):
            told = [await next_load(call)]
            while figures(told[-1]) != (0, 0, 0):
                told.append(await next_load(call))
        waiting = {load.waiting_requests: load.queued_uncached_tokens for load in told}
        assert waiting[2] == 800
        assert 0 < waiting[1] < 400
        call.cancel()
