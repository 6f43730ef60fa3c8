"""Failover over real sockets with scripted engines: what clients see, what the next engine is sent."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.tokenizer_app import (
    Service,
    collect,
    default_model,
    eventually,
    failure,
    ids_request,
    model_info,
    running,
)
from tokenwire.common.v1 import outcome_pb2
from tokenwire.engine.v1 import engine_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client import NO_RETRIES, AsyncClient
from tokenwire_client.errors import Unavailable
from tokenwire_client.types import Usage

WORDS = [13874, 19556, 28, 905, 17]
HANG_S = 1.0
Script = Callable[[fe.FakeRequest], Awaitable[None]]


@asynccontextmanager
async def two_engines(first: Script, **settings: Any) -> AsyncIterator[Service]:
    """The first engine that is sent a request follows the script; whoever gets one after it plays the rest of WORDS."""
    begun = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        if not begun.is_set():
            begun.set()
            await first(request)
            return
        rest = WORDS[len(request.message.resumed_token_ids) :]
        for token_id in rest:
            await request.send([token_id])
        usage = outcome_pb2.Usage(prompt_tokens=2, completion_tokens=len(WORDS), cached_tokens=9)
        await request.send([], engine_pb2.Finish(reason=fe.LENGTH, usage=usage))

    infos = [model_info(default_model()) for _ in range(2)]
    async with running(default_model(), script, infos=infos, failover_wait=10.0, **settings) as service:
        await eventually(lambda: service.app.fleet.router.num_connected == 2)
        yield service


def taken(service: Service) -> list[fe.FakeRequest]:
    """The requests of both engines, the one that was resumed last."""
    found = [request for engine in service.engines for request in engine.requests]
    return sorted(found, key=lambda request: request.number)


async def text_of(service: Service, count: int = len(WORDS)) -> str:
    """Of the first `count` tokens."""
    answer = await service.stub.Detokenize(pb.DetokenizeRequest(token_ids=WORDS[:count]))
    return str(answer.text)


async def test_an_engine_that_dies_is_not_noticed() -> None:
    async def dies(request: fe.FakeRequest) -> None:
        await request.send(WORDS[:2], cached_tokens=1)
        request.session.dead.set()

    async with two_engines(dies) as service:
        call = service.stub.Generate(ids_request([5, 6], request_id="r", sampling={"seed": 4, "max_tokens": 5}))
        answer = await collect(call)
        assert answer.token_ids == WORDS
        assert answer.text == await text_of(service)
        usage = answer.completion.usage
        # Cached is what the first engine had: nobody computed the rest for nothing.
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (2, 5, 1)
        first, second = taken(service)
        assert (first.prompt, second.prompt) == ([5, 6], [5, 6])
        assert list(second.message.resumed_token_ids) == WORDS[:2]
        assert first.message.request_id != second.message.request_id
        assert (first.client_id, second.client_id) == ("r", "r")
        assert second.message.sampling.seed == first.message.sampling.seed == 4
        assert second.message.sampling.max_tokens == 5
        assert service.metric("failovers_total", reason="lost") == 1
        assert service.metric("prompt_tokens_total") == 2
        assert service.outcomes() == {("Generate", "OK"): 1, ("Detokenize", "OK"): 1}


async def test_an_engine_that_falls_silent_is_left_and_its_late_tokens_are_ignored() -> None:
    goes_on = asyncio.Event()

    async def hangs(request: fe.FakeRequest) -> None:
        await request.send(WORDS[:1])
        await goes_on.wait()
        await request.play([7, 7, 7])

    async with two_engines(hangs, engine_hang_timeout=HANG_S) as service:
        begin = asyncio.get_running_loop().time()
        call = service.stub.Generate(ids_request([5], request_id="r"))
        answer = await collect(call)
        assert answer.token_ids == WORDS
        assert asyncio.get_running_loop().time() - begin >= HANG_S * 0.7
        assert service.metric("failovers_total", reason="hang") == 1
        silent = next(engine for engine in service.engines if engine.requests[0].number == 1)
        state = service.metric("engine_breaker_state", engine=silent.address)
        assert state == 2
        goes_on.set()
        await silent.wait_until(lambda: silent.num_live == 0)


async def test_a_drain_past_its_grace_and_a_death_behind_a_living_front_are_carried_over() -> None:
    """The engine's last word is UNAVAILABLE; tokens of the same message count."""

    async def gives_up(request: fe.FakeRequest) -> None:
        error = outcome_pb2.RequestError(grpc_code=grpc.StatusCode.UNAVAILABLE.value[0], message="shutting down")
        await request.send(WORDS[:3], request.finish(fe.ABORT, extra_tokens=3, error=error))

    async with two_engines(gives_up) as service:
        assert (await collect(service.stub.Generate(ids_request([5])))).token_ids == WORDS
        assert list(taken(service)[1].message.resumed_token_ids) == WORDS[:3]
        assert service.metric("failovers_total", reason="ended") == 1


async def test_a_full_queue_sends_the_request_to_the_other_engine() -> None:
    def full(request: fe.FakeRequest) -> Any:
        error = outcome_pb2.RequestError(grpc_code=grpc.StatusCode.RESOURCE_EXHAUSTED.value[0], message="full")
        error.retry_delay.FromSeconds(1)
        return request.send([], request.finish(fe.ERROR, error=error))

    async with two_engines(full) as service:
        assert (await collect(service.stub.Generate(ids_request([5])))).token_ids == WORDS
        assert {len(engine.requests) for engine in service.engines} == {1}
        assert service.metric("failovers_total", reason="full") == 1
        for engine in service.engines:
            engine.script = full
        error = await failure(service.stub.Generate(ids_request([5])))
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        assert [len(engine.requests) for engine in service.engines] == [2, 2]


async def test_stop_strings_across_the_switch_are_found() -> None:
    """The first part of the stop string is held back when the engine dies, and comes from nowhere else."""

    async def dies(request: fe.FakeRequest) -> None:
        await request.send(WORDS[:2])
        request.session.dead.set()

    async with two_engines(dies) as service:
        text = await text_of(service)
        first = await text_of(service, 2)
        stop = text[len(first) - 2 : len(first) + 1]
        answer = await collect(service.stub.Generate(ids_request([5], stop=[stop])))
        assert answer.text == text[: text.index(stop)]
        assert answer.completion.stop_string == stop


async def test_with_no_engine_left_the_client_is_told_after_the_wait() -> None:
    async def begins(request: fe.FakeRequest) -> None:
        await request.send(WORDS[:2])

    async with running(default_model(), begins, failover_wait=0.2) as service:
        await service.engine.wait_until(lambda: len(service.engine.sessions) == 1)
        async with AsyncClient(f"127.0.0.1:{service.app.port}", retry=NO_RETRIES) as client:
            reader, received = aiter(client.generate([5, 6, 7])), 0
            while received < 2:
                received += len((await anext(reader)).token_ids)
            await service.engine.stop()
            with pytest.raises(Unavailable) as caught:
                await anext(reader)
        assert caught.value.usage == Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=0)
        assert service.metric("failed_failovers_total", cause="no_engine") == 1
        assert service.metric("generated_tokens_total") == 2
        assert service.app.admission.num_active == 0


async def test_an_engine_of_other_weights_is_refused_beside_the_first() -> None:
    infos = [model_info(default_model(), weights_fingerprint=name * 8, dtype="float32") for name in ("ab", "cd")]

    async def plays(request: fe.FakeRequest) -> None:
        await request.play([19556])

    async with running(default_model(), plays, infos=infos) as service:
        first, second = service.engines
        await eventually(lambda: len(first.opened) + len(second.opened) >= 4)
        connections = service.app.fleet.router.connections
        assert service.app.fleet.router.num_connected == 1
        refused = next(each for each in connections if not each.is_connected)
        assert "abab" in refused._last_complaint
        assert "cdcd" in refused._last_complaint
        taker = next(each for each in connections if each.is_connected)
        await next(each for each in service.engines if each.address == taker.address).stop()
        await eventually(lambda: refused.is_connected)
