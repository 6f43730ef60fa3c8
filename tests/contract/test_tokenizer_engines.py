"""The tokenizer service and its engine replicas: matching, losing, finding again, sharing work."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tests.fixtures import fake_engine as fe
from tests.fixtures.tokenizer_app import (
    MODEL_NAME,
    collect,
    default_model,
    eventually,
    failure,
    ids_request,
    model_info,
    running,
)
from tokenizer_service.api.grpc_service import SERVICE_NAME
from tokenizer_service.engines.messages import SamplingOptions, TokenNews, TokenSubmission
from tokenizer_service.engines.refusal import Refusal
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def hello(request: fe.FakeRequest) -> None:
    await request.play([19556], eos=2)


MISMATCHES: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"tokenizer_fingerprint": "ab" * 32}, ("ab" * 32, default_model().fingerprint)),
    ({"tokenizer_fingerprint": ""}, (default_model().fingerprint, "none")),
    ({"vocab_size": 49_151}, ("49,152", "49,151")),
    ({"max_model_len": 0}, ("0",)),
]


@pytest.mark.parametrize(("changes", "words"), MISMATCHES)
async def test_a_mismatch_is_said_once_and_never_served(
    changes: dict[str, Any], words: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """B144: readiness fails, and the reason names both sides."""
    infos = [model_info(default_model(), **changes)]
    async with running(default_model(), hello, infos=infos, wait=False) as service:
        await service.engine.wait_until(lambda: len(service.engine.opened) >= 3)
        assert await service.health() == NOT_SERVING
        assert await service.health(SERVICE_NAME) == NOT_SERVING
        error = await failure(service.stub.Generate(ids_request([5])))
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert service.metric("engines_connected") == 0
        reason = service.app.fleet.router.connections[0]._last_complaint
        assert all(word in reason for word in words)
        (model,) = (await service.stub.ListModels(pb.ListModelsRequest())).models
        assert (model.name, model.connected_engines) == (MODEL_NAME, 0)


async def test_a_mismatch_can_be_allowed() -> None:
    infos = [model_info(default_model(), tokenizer_fingerprint="")]
    async with running(default_model(), hello, infos=infos, allow_tokenizer_mismatch=True) as service:
        assert (await collect(service.stub.Generate(ids_request([5])))).text == "Hello"


async def test_health_follows_the_engine_and_a_restarted_engine_is_found_again() -> None:
    async with running(default_model(), hello) as service:
        assert await service.health(SERVICE_NAME) == SERVING
        assert service.metric("engines_connected") == 1
        await service.engine.stop()
        await service.wait_health(False)
        error = await failure(service.stub.Generate(ids_request([5])))
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "no engine is connected")
        assert (await service.stub.Tokenize(pb.TokenizeRequest(text="a"))).token_ids
        await service.engine.start(service.engine.port)
        await service.wait_health(True)
        assert (await collect(service.stub.Generate(ids_request([5])))).text == "Hello"


async def test_a_broken_session_is_opened_again_and_handles_are_never_reused() -> None:
    async with running(default_model(), hello) as service:
        for _ in range(3):
            await collect(service.stub.Generate(ids_request([5])))
            await service.engine.break_sessions()
            await service.engine.wait_until(lambda: len(service.engine.sessions) == 1)
            await service.wait_health(True)
        handles = [request.handle for request in service.engine.requests]
        assert handles == sorted(set(handles))
        assert len(service.engine.opened) == 4
        assert service.engine.opened[0].client_name


class _BrokenSink:
    """Raises where it must not; counts how often it was told that the engine is lost."""

    def __init__(self) -> None:
        self.num_lost = 0

    def on_news(self, news: TokenNews) -> None:
        raise RuntimeError("a bug of ours")

    def on_lost(self, refusal: Refusal) -> None:
        self.num_lost += 1


async def test_a_bug_in_delivery_costs_a_session_and_not_the_replica() -> None:
    async with running(default_model(), hello) as service:
        connection = service.app.fleet.router.connections[0]
        sink = _BrokenSink()
        assert not isinstance(connection.submit(TokenSubmission("broken", [5], SamplingOptions()), sink), Refusal)
        await service.engine.wait_until(lambda: len(service.engine.opened) == 2)
        await service.wait_health(True)
        assert sink.num_lost == 1
        assert (await collect(service.stub.Generate(ids_request([5])))).text == "Hello"


async def test_the_service_waits_for_an_engine_that_starts_later() -> None:
    async with running(default_model(), hello, wait=False, engine=("127.0.0.1:1",)) as service:
        assert await service.health() == NOT_SERVING
        error = await failure(service.stub.Generate(ids_request([5])))
        assert error.code() == grpc.StatusCode.UNAVAILABLE


async def test_work_goes_to_the_engine_with_the_least_outstanding_tokens() -> None:
    """B115: equal replicas take turns, a loaded one is spared."""
    infos = [model_info(default_model()), model_info(default_model())]
    async with running(default_model(), fe.until_cancelled, infos=infos, wait=False) as service:
        first, second = service.engines
        await eventually(lambda: service.app.fleet.router.num_connected == 2)
        sampling = {"max_tokens": 10}
        calls = []

        async def send(prompt: int) -> None:
            before = len(first.requests) + len(second.requests)
            calls.append(service.stub.Generate(ids_request([5] * prompt, sampling=sampling)))
            await eventually(lambda: len(first.requests) + len(second.requests) > before)

        await send(1000)
        loaded, spared = (first, second) if first.requests else (second, first)
        for _ in range(10):
            await send(20)
        assert (len(loaded.requests), len(spared.requests)) == (1, 10)
        for call in calls:
            call.cancel()
        connections = service.app.fleet.router.connections
        await eventually(lambda: all(c.outstanding_tokens == 0 for c in connections))
        for _ in range(10):
            await send(1)
            calls.pop().cancel()
            await eventually(lambda: service.app.admission.num_active == 0)
        assert (len(loaded.requests), len(spared.requests)) == (1 + 5, 10 + 5)


async def test_one_engine_lost_all_requests_go_on() -> None:
    infos = [model_info(default_model()), model_info(default_model())]
    release = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        await request.send([13874])
        await release.wait()
        await request.play([19556], eos=2)

    async with running(default_model(), script, infos=infos, wait=False) as service:
        await eventually(lambda: service.app.fleet.router.num_connected == 2)
        calls = [service.stub.Generate(ids_request([5])) for _ in range(2)]
        for call in calls:
            await anext(aiter(call))
        assert [len(engine.requests) for engine in service.engines] == [1, 1]
        await service.engines[0].stop()
        release.set()
        await asyncio.gather(*(collect(call) for call in calls))
        assert [list(request.message.resumed_token_ids) for request in service.engines[1].requests] == [[], [13874]]
        assert service.metric("failovers_total", reason="lost") == 1
        assert service.metric("resumed_tokens_total") == 1
        assert await service.health() == SERVING
        assert service.metric("engines_connected") == 1


async def test_a_quiet_session_has_heartbeats() -> None:
    async with running(default_model(), hello, engine_hang_timeout=0.6) as service:
        engine = service.engine
        assert engine.opened[0].heartbeat.ToMilliseconds() == 200
        await engine.wait_until(lambda: engine.num_heartbeats >= 3)
        assert (await collect(service.stub.Generate(ids_request([5])))).text == "Hello"
        await engine.wait_until(lambda: engine.num_heartbeats >= 5)
        assert len(engine.opened) == 1


async def test_an_older_engine_is_sent_no_heartbeats() -> None:
    async with running(default_model(), hello, engine_hang_timeout=0.6) as service:
        engine = service.engine
        engine.takes_heartbeats = False
        await engine.break_sessions()
        await engine.wait_until(lambda: len(engine.opened) == 2)
        sent = engine.num_heartbeats
        await asyncio.sleep(1.0)  # five heartbeats
        assert engine.num_heartbeats == sent
        await service.wait_health(True)
        assert (await collect(service.stub.Generate(ids_request([5])))).text == "Hello"
