"""A cancel in the middle of a step: that step is the request's last, and its blocks go back with it."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.fixtures.engine_calls import (
    cancel,
    generate_request,
    open_session,
    read_outputs,
    submit,
    token_request,
    until,
)
from tests.fixtures.scripted_engine import ScriptedService, continuation, scripted_service
from tokenwire.engine.v1 import engine_pb2

PROMPT = [3, 4]


async def _generate(service: ScriptedService) -> tuple[list[int], Callable[[], Awaitable[Any]]]:
    call = service.stub.Generate(generate_request(PROMPT, 400, request_id="mine"))
    message = await call.read()
    assert isinstance(message, engine_pb2.GenerateResponse)

    async def leave() -> None:
        call.cancel()

    return list(message.token_ids), leave


async def _abort(service: ScriptedService) -> tuple[list[int], Callable[[], Awaitable[Any]]]:
    tokens, _ = await _generate(service)

    async def leave() -> None:
        # Its answer comes when the engine has let go, that is after the step.
        service.stub.Abort(engine_pb2.AbortRequest(request_ids=["mine"]))

    return tokens, leave


async def _session(service: ScriptedService) -> tuple[list[int], Callable[[], Awaitable[Any]]]:
    call = await open_session(service)
    await submit(call, 1, token_request(PROMPT, 400))
    (output,) = await read_outputs(call)
    return list(output.token_ids), lambda: cancel(call, 1)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("start", [_generate, _abort, _session])
async def test_a_cancelled_request_is_gone_after_the_step_it_is_in(start: Any, overlap: bool) -> None:
    """B039, and issue A's "blocks free within one step": no step is planned for it once the engine knows."""
    async with scripted_service(gated=True, overlap=overlap) as service:
        service.worker.allow(1)
        tokens, leave = await start(service)
        assert tokens == continuation(PROMPT, 1)
        # The engine waits in a step for the gate; overlapped, with the next step planned already.
        await until(lambda: len(service.worker.plans) == (3 if overlap else 2))
        assert service.metric("kv_blocks", state="used") > 0
        await leave()
        await until(lambda: all(live.is_cut for live in service.handle._live.values()))
        planned = len(service.worker.plans)
        assert planned == (3 if overlap else 2)
        service.worker.allow(1)
        await until(lambda: service.handle.num_live == 0)
        # Overlapped, one more plan was made before the engine looked; its blocks go back when it is settled.
        service.worker.allow(1)
        await until(lambda: service.metric("kv_blocks", state="used") == 0)
        assert not [plan for plan in service.worker.plans[planned:] if plan.chunks]
