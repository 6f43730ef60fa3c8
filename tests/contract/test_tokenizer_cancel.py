"""Leaving, deadlines, slow readers and limits of the tokenizer service: nothing goes on, nothing is left behind."""

import asyncio
import logging

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
    running,
)
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb


def gauges(service: Service) -> dict[str, float]:
    return {name: service.metric(name) for name in ("active_requests", "encode_queue")}


def live(service: Service) -> tuple[int, int, int]:
    """What a request leaves behind if it leaks: places, live handles, outstanding tokens."""
    connection = service.app.fleet.router.connections[0]
    return service.app.admission.num_active, connection.num_live, connection.outstanding_tokens


@pytest.mark.parametrize("first_tokens", [0, 3], ids=["before the first token", "in mid-stream"])
async def test_a_cancelled_stream_is_gone_within_a_second(first_tokens: int) -> None:
    """B044: the handler waits for the engine when the client leaves; task count returns to its baseline."""

    async def script(request: fe.FakeRequest) -> None:
        for token_id in range(1000, 1000 + first_tokens):
            await request.send([token_id])
        await fe.until_cancelled(request)

    async with running(default_model(), script) as service:
        await failure(service.stub.Generate(ids_request([])))  # the channel is up
        baseline = len(asyncio.all_tasks())
        call = service.stub.Generate(ids_request([5]))
        await service.engine.wait_until(lambda: len(service.engine.requests) == 1)
        for _ in range(first_tokens and 1):
            await anext(aiter(call))
        call.cancel()
        await asyncio.wait_for(service.engine.requests[0].cancelled.wait(), 1.0)
        await eventually(lambda: live(service) == (0, 0, 0), 1.0)
        await eventually(lambda: len(asyncio.all_tasks()) <= baseline, 1.0)
        assert service.outcomes()["Generate", "CANCELLED"] == 1


async def three_tokens(request: fe.FakeRequest) -> None:
    for token_id in (1000, 1001, 1002):
        await request.send([token_id])
    await fe.until_cancelled(request)


async def test_a_thousand_cancels_are_no_errors(caplog: pytest.LogCaptureFixture) -> None:
    """B123, B141, B142, B043: codes say CANCELLED, no ERROR line, every place is free again."""
    with caplog.at_level(logging.WARNING):
        async with running(default_model(), three_tokens) as service:
            for _ in range(20):
                calls = [service.stub.Generate(ids_request([5])) for _ in range(50)]
                for place, call in enumerate(calls):
                    if place % 2:
                        await anext(aiter(call))
                    call.cancel()
                await eventually(lambda: live(service) == (0, 0, 0))
            outcomes = service.outcomes()
            assert set(outcomes) == {("Generate", "CANCELLED")}
            # A call that was cancelled before it was sent never arrives.
            assert 500 <= outcomes["Generate", "CANCELLED"] <= 1000
            assert gauges(service) == {"active_requests": 0, "encode_queue": 0}
            answer = service.stub.Generate(ids_request([5], sampling={"max_tokens": 1}))
            await anext(aiter(answer))
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_the_deadline_ends_the_request_in_the_engine() -> None:
    async with running(default_model(), fe.until_cancelled) as service:
        error = await failure(service.stub.Generate(ids_request([5]), timeout=0.3))
        assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(service.engine.requests[0].cancelled.wait(), 1.0)
        await eventually(lambda: live(service) == (0, 0, 0), 1.0)
        assert service.outcomes() == {("Generate", "DEADLINE_EXCEEDED"): 1}


async def test_a_client_that_leaves_during_encoding_reaches_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    encoding, go_on = asyncio.Event(), asyncio.Event()

    def slow_encode(*_: object) -> list[int]:
        loop.call_soon_threadsafe(encoding.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        return [5]

    async with running(default_model(), fe.until_cancelled) as service:
        monkeypatch.setattr(default_model().encoder, "encode", slow_encode)
        call = service.stub.Generate(pb.GenerateRequest(text="Hi"))
        waiting = asyncio.create_task(failure(call))
        await encoding.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await eventually(lambda: live(service) == (0, 0, 0), 1.0)
        go_on.set()
        monkeypatch.undo()
        assert (await service.stub.Tokenize(pb.TokenizeRequest(text="Hi"))).token_ids
        assert service.engine.requests == []


async def test_a_slow_reader_is_bounded_and_then_refused() -> None:
    """The engine is not held up, memory is bounded, the request ends with RESOURCE_EXHAUSTED, others go on."""
    limit = 2_000

    async def script(request: fe.FakeRequest) -> None:
        tokens = 500 if request.prompt == [5] else 1
        while not request.cancelled.is_set():
            await request.send([13874] * tokens)
            await asyncio.sleep(0)

    async with running(default_model(), script, max_unread_tokens=limit) as service:
        slow = service.stub.Generate(ids_request([5]))  # nobody reads it
        other = aiter(service.stub.Generate(ids_request([6])))
        await anext(other)
        await asyncio.wait_for(service.engine.requests[0].cancelled.wait(), 20)
        assert (await anext(other)).token_ids
        error = await failure(slow)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2,500 tokens" in (error.details() or "")


async def test_a_reader_that_comes_back_gets_every_token_once_merged() -> None:
    ids = [1000 + number for number in range(3000)]
    done = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        await request.play(ids)
        done.set()

    async with running(default_model(), script) as service:
        call = service.stub.Generate(ids_request([5]))
        await asyncio.wait_for(done.wait(), 30)
        answer = await collect(call)
        assert answer.token_ids == ids


async def test_requests_over_the_limit_are_refused_and_the_place_is_given_back() -> None:
    """B118."""
    async with running(default_model(), fe.until_cancelled, max_requests=3) as service:
        calls = [service.stub.Generate(ids_request([5])) for _ in range(3)]
        await service.engine.wait_until(lambda: len(service.engine.requests) == 3)
        for refused in (
            service.stub.Generate(ids_request([5])),
            service.stub.Tokenize(pb.TokenizeRequest(text="a")),
        ):
            error = await failure(refused)
            assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "limit is 3" in (error.details() or "")
        assert service.metric("active_requests") == 3
        calls[0].cancel()
        await eventually(lambda: service.app.admission.num_active == 2)
        assert (await service.stub.Tokenize(pb.TokenizeRequest(text="a"))).token_ids
        for call in calls:
            call.cancel()
        await eventually(lambda: live(service) == (0, 0, 0))


async def test_a_full_encode_queue_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    go_on = asyncio.Event()

    def slow_encode(*_: object) -> list[int]:
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result()
        return [5]

    async with running(default_model(), fe.until_cancelled, encode_threads=1, max_queued_encodes=2) as service:
        monkeypatch.setattr(default_model().encoder, "encode", slow_encode)
        tasks = [
            asyncio.ensure_future(service.stub.Tokenize(pb.TokenizeRequest(text=str(number)))) for number in range(3)
        ]
        await eventually(lambda: service.metric("encode_queue") == 2)
        error = await failure(service.stub.Tokenize(pb.TokenizeRequest(text="a")))
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        go_on.set()
        assert [list(answer.token_ids) for answer in await asyncio.gather(*tasks)] == [[5]] * 3
        assert gauges(service) == {"active_requests": 0, "encode_queue": 0}


async def test_every_outcome_is_counted_once_and_every_gauge_comes_back() -> None:
    """B141, B142: 100 mixed requests."""

    async def script(request: fe.FakeRequest) -> None:
        match request.client_id.split("-")[0]:
            case "ok":
                await request.play([1000, 1001], eos=2)
            case "error":
                await request.send([], request.finish(fe.ERROR, error=fe.error(13, "broken")))
            case _:
                await fe.until_cancelled(request)

    async with running(default_model(), script) as service:
        # Those with a deadline first: on a busy machine it must not pass before the call is read.
        kinds = ["deadline"] * 20 + ["ok", "error", "invalid", "cancel"] * 20
        calls = []
        for number, kind in enumerate(kinds):
            if number == 20:
                await service.engine.wait_until(lambda: len(service.engine.requests) == 20)
            ids = [] if kind == "invalid" else [5]
            request = ids_request(ids, request_id=f"{kind}-{number}")
            calls.append(service.stub.Generate(request, timeout=2.5 if kind == "deadline" else 30))
        await service.engine.wait_until(lambda: len(service.engine.requests) == 80)
        for kind, call in zip(kinds, calls, strict=True):
            if kind == "cancel":
                call.cancel()
            elif kind == "ok":
                assert (await collect(call)).token_ids == [1000, 1001, 2]
            else:
                await failure(call)
        await eventually(lambda: live(service) == (0, 0, 0), 3.0)
        codes = ("OK", "INTERNAL", "INVALID_ARGUMENT", "CANCELLED", "DEADLINE_EXCEEDED")
        assert service.outcomes() == {("Generate", code): 20 for code in codes}
        assert gauges(service) == {"active_requests": 0, "encode_queue": 0}
        assert service.metric("generated_tokens_total") == 60
        assert service.metric("request_seconds_count") == 80
