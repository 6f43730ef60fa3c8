"""EngineService over real sockets, with the real scheduler, loop and mailbox and a scripted worker."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from tests.fixtures.hostile_token_requests import CASES, Case
from tests.fixtures.scripted_engine import ScriptedService, continuation, scripted_service
from tokenwire.common.v1 import outcome_pb2, sampling_pb2
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

Session = grpc.aio.StreamStreamCall[engine_pb2.SessionRequest, engine_pb2.SessionResponse]
WAIT_S = 10.0


def token_request(
    prompt: list[int], max_tokens: int = 5, request_id: str = "", timeout_s: float | None = None, **sampling: object
) -> engine_pb2.TokenRequest:
    message = engine_pb2.TokenRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling),  # type: ignore[arg-type]
    )
    if timeout_s is not None:
        message.timeout.CopyFrom(Duration(nanos=int(timeout_s * 1e9)))
    return message


def generate_request(*args: object, **fields: object) -> engine_pb2.GenerateRequest:
    return engine_pb2.GenerateRequest(request=token_request(*args, **fields))  # type: ignore[arg-type]


async def collect(
    call: grpc.aio.UnaryStreamCall[engine_pb2.GenerateRequest, engine_pb2.GenerateResponse],
) -> tuple[list[int], engine_pb2.Finish]:
    (sample,) = await collect_samples(call, 1)
    return sample


async def collect_samples(
    call: grpc.aio.UnaryStreamCall[engine_pb2.GenerateRequest, engine_pb2.GenerateResponse], count: int
) -> list[tuple[list[int], engine_pb2.Finish]]:
    """Tokens and finish of each sample, by index."""
    tokens: list[list[int]] = [[] for _ in range(count)]
    finishes: dict[int, engine_pb2.Finish] = {}
    async with asyncio.timeout(WAIT_S):
        while isinstance(message := await call.read(), engine_pb2.GenerateResponse):
            assert message.index not in finishes, "a message after the finish"
            tokens[message.index] += message.token_ids
            if message.HasField("finish"):
                finishes[message.index] = message.finish
    assert finishes.keys() == set(range(count))
    return [(tokens[index], finishes[index]) for index in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (the state of another thread)
            await asyncio.sleep(0.005)


@asynccontextmanager
async def slow_steps(service: ScriptedService) -> AsyncIterator[None]:
    """Lets the gated engine step every few milliseconds, so that a command reaches it before its request ends."""

    async def step() -> None:
        while True:
            service.worker.allow()
            await asyncio.sleep(0.005)

    stepping = asyncio.create_task(step())
    try:
        yield
    finally:
        stepping.cancel()
        service.worker.open_gate()


async def read_all(call: Any, received: list[int]) -> None:
    """Reads to the end of the call; raises its error."""
    async with asyncio.timeout(WAIT_S):
        while (message := await call.read()) is not grpc.aio.EOF:
            received += getattr(message, "token_ids", [])


async def failure(call: grpc.aio.Call, received: list[int] | None = None) -> grpc.aio.AioRpcError:
    """The error that the call ends with; the tokens it sent before go to `received`."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read_all(call, [] if received is None else received)
    return caught.value


def details(error: grpc.aio.AioRpcError, kind: type) -> list[object]:
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    found = []
    for packed in status.details:
        message = kind()
        if packed.Unpack(message):
            found.append(message)
    return found


async def open_session(
    service: ScriptedService, stub: "engine_pb2_grpc.EngineServiceAsyncStub | None" = None
) -> Session:
    call = (stub or service.stub).Session()
    await call.write(engine_pb2.SessionRequest(open=engine_pb2.OpenSession(client_name="test")))
    opened = await call.read()
    assert isinstance(opened, engine_pb2.SessionResponse)
    assert opened.WhichOneof("event") == "opened"
    return call


async def submit(call: Session, handle: int, message: engine_pb2.TokenRequest) -> None:
    await call.write(engine_pb2.SessionRequest(submit=engine_pb2.SubmitRequest(handle=handle, request=message)))


async def cancel(call: Session, handle: int) -> None:
    await call.write(engine_pb2.SessionRequest(cancel=engine_pb2.CancelRequest(handle=handle)))


async def read_outputs(call: Session) -> list[engine_pb2.RequestOutput]:
    async with asyncio.timeout(WAIT_S):
        message = await call.read()
    assert isinstance(message, engine_pb2.SessionResponse), await call.code()
    assert message.WhichOneof("event") == "step"
    return list(message.step.outputs)


async def read_until_finished(call: Session, handles: set[int]) -> dict[int, tuple[list[int], engine_pb2.Finish]]:
    tokens: dict[int, list[int]] = {handle: [] for handle in handles}
    finished: dict[int, tuple[list[int], engine_pb2.Finish]] = {}
    while finished.keys() != handles:
        outputs = await read_outputs(call)
        assert len({output.handle for output in outputs}) == len(outputs)
        for output in outputs:
            assert (output.handle in finished, output.index) == (False, 0)
            tokens[output.handle] += output.token_ids
            if output.HasField("finish"):
                finished[output.handle] = (tokens[output.handle], output.finish)
    return finished


async def read_samples(
    call: Session, counts: dict[int, int]
) -> dict[tuple[int, int], tuple[list[int], engine_pb2.Finish]]:
    """`counts`: samples of each handle -> tokens and finish by (handle, index)."""
    names = {(handle, index) for handle, count in counts.items() for index in range(count)}
    tokens: dict[tuple[int, int], list[int]] = {name: [] for name in names}
    finished: dict[tuple[int, int], tuple[list[int], engine_pb2.Finish]] = {}
    while finished.keys() != names:
        for output in await read_outputs(call):
            name = (output.handle, output.index)
            assert name not in finished
            tokens[name] += output.token_ids
            if output.HasField("finish"):
                finished[name] = (tokens[name], output.finish)
    return finished


async def test_generate_streams_the_continuation() -> None:
    async with scripted_service() as service:
        call = service.stub.Generate(generate_request([5, 6, 7], 9))
        tokens, finish = await collect(call)
    assert tokens == continuation([5, 6, 7], 9)
    assert finish.reason == outcome_pb2.FINISH_REASON_LENGTH
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens, finish.usage.cached_tokens) == (3, 9, 0)
    assert not finish.HasField("error")
    assert not finish.HasField("stop_token_id")


async def test_stop_token_is_reported_and_counted() -> None:
    stop = continuation([5], 4)[3]
    async with scripted_service() as service:
        tokens, finish = await collect(service.stub.Generate(generate_request([5], 9, stop_token_ids=[stop])))
    assert tokens == continuation([5], 4)
    assert (finish.reason, finish.stop_token_id) == (outcome_pb2.FINISH_REASON_STOP, stop)
    assert finish.usage.completion_tokens == 4


@pytest.mark.parametrize(("given", "reported"), [(None, 77), (0, 0), (-5, -5), (2**63 - 1, 2**63 - 1)])
async def test_the_seed_that_was_used_is_reported(given: int | None, reported: int) -> None:
    async with scripted_service(seed=77) as service:
        _, finish = await collect(service.stub.Generate(generate_request([5], 2, seed=given)))
    assert finish.seed == reported


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


# The scripted engine's model has no tokenizer, so it cannot follow a structured output.
OVER_THE_WIRE = [case for case in CASES if case.is_refused or case.field != "sampling.structured_output"]


@pytest.mark.parametrize("case", OVER_THE_WIRE, ids=str)
async def test_hostile_values_over_generate_and_session(case: Case) -> None:
    """Every field of the request is honoured or INVALID_ARGUMENT with path and numbers, in both styles alike."""
    async with scripted_service(max_waiting_requests=128) as service:
        good = service.stub.Generate(generate_request([1, 2, 3], 40))
        call = await open_session(service)
        await submit(call, 1, case.message())
        tokens, finish = (await read_samples(call, {1: case.samples}))[1, 0]
        generated = service.stub.Generate(engine_pb2.GenerateRequest(request=case.message()))
        if case.is_refused:
            error = await failure(generated)
            (bad,) = details(error, error_details_pb2.BadRequest)
            (violation,) = bad.field_violations  # type: ignore[attr-defined]
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert violation.field == f"request.{case.field}"
            assert (finish.reason, finish.error.grpc_code) == (outcome_pb2.FINISH_REASON_ERROR, 3)
            assert finish.error.field_violations[0].field == violation.field
            assert finish.error.message == violation.description
            for number in case.numbers:
                assert number in violation.description
        else:
            assert finish.reason in (outcome_pb2.FINISH_REASON_LENGTH, outcome_pb2.FINISH_REASON_STOP)
            assert (await collect_samples(generated, case.samples))[0][0] == tokens
        assert (await collect(good))[0] == continuation([1, 2, 3], 40)


async def test_request_without_a_body_and_unknown_fields() -> None:
    async with scripted_service() as service:
        error = await failure(service.stub.Generate(engine_pb2.GenerateRequest()))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert details(error, error_details_pb2.BadRequest)[0].field_violations[0].field == (  # type: ignore[attr-defined]
            "request.prompt_token_ids"
        )
        newer = engine_pb2.GenerateRequest.FromString(generate_request([4], 3).SerializeToString() + b"\xfa\x3f\x03new")
        assert (await collect(service.stub.Generate(newer)))[0] == continuation([4], 3)


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


async def test_duplicate_request_id_is_already_exists() -> None:
    async with scripted_service(gated=True) as service:
        first = service.stub.Generate(generate_request([1], 3, request_id="same"))
        await until(lambda: service.handle.num_live == 1)
        error = await failure(service.stub.Generate(generate_request([2], 3, request_id="same")))
        assert error.code() is grpc.StatusCode.ALREADY_EXISTS
        service.worker.open_gate()
        assert (await collect(first))[0] == continuation([1], 3)
        again = service.stub.Generate(generate_request([2], 3, request_id="same"))
        assert (await collect(again))[0] == continuation([2], 3)


async def test_full_queue_is_resource_exhausted_with_retry_info() -> None:
    """B118: request number limit + 1 is answered at once; the ones before are served."""
    async with scripted_service(gated=True, max_num_requests=1, max_waiting_requests=2) as service:
        running = service.stub.Generate(generate_request([1], 3))
        await until(lambda: bool(service.worker.plans))
        waiting = [service.stub.Generate(generate_request([i], 3)) for i in (2, 3)]
        await until(lambda: service.handle.num_live == 3)
        refused = service.stub.Generate(generate_request([4], 3))
        session = await open_session(service)
        await submit(session, 1, token_request([5], 3))
        await until(lambda: service.handle.num_live == 5)
        service.worker.allow()
        error = await failure(refused)
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2" in (error.details() or "")
        (retry,) = details(error, error_details_pb2.RetryInfo)
        assert retry.retry_delay.ToNanoseconds() > 0  # type: ignore[attr-defined]
        _, finish = (await read_until_finished(session, {1}))[1]
        assert finish.error.grpc_code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        assert finish.error.HasField("retry_delay")
        service.worker.open_gate()
        for prompt, call in ((1, running), (2, waiting[0]), (3, waiting[1])):
            assert (await collect(call))[0] == continuation([prompt], 3)
        assert service.metric("requests_total", outcome="rejected", code="queue_full") == 2


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


async def test_engine_death_ends_every_stream_with_unavailable() -> None:
    """B112, B138: all live calls get a status at once; a new call says that there is no engine."""
    async with scripted_service(poison=13, gated=True) as service:
        session = await open_session(service)
        await submit(session, 1, token_request([1], 400))
        calls = [service.stub.Generate(generate_request([i], 400)) for i in range(2, 6)]
        await until(lambda: service.handle.num_live == 5)
        health = health_pb2_grpc.HealthStub(service.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        calls.append(service.stub.Generate(generate_request([13], 400)))
        await until(lambda: service.handle.num_live == 6)
        service.worker.open_gate()
        errors = [await failure(call) for call in [*calls, session]]
        assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
        assert all("RuntimeError" not in (error.details() or "") for error in errors)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        async with asyncio.timeout(WAIT_S):
            while (await watch.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
                pass
        assert service.metric("up") == 0
        assert service.metric("running_requests") == 0
        refused = await failure(service.stub.Generate(generate_request([1], 4)))
        assert refused.code() is grpc.StatusCode.UNAVAILABLE
        for method, message in (
            (service.stub.GetModelInfo, engine_pb2.GetModelInfoRequest()),
            (service.stub.GetLoad, engine_pb2.GetLoadRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await method(message)  # type: ignore[operator]
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert (await failure(service.stub.Session())).code() is grpc.StatusCode.UNAVAILABLE


async def test_restarted_engine_serves_again_with_a_new_epoch() -> None:
    async with scripted_service(poison=13, restart=True) as service:
        await collect(service.stub.Generate(generate_request([1], 4)))
        error = await failure(service.stub.Generate(generate_request([13], 4)))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: service.handle.current is not None)
        tokens, _ = await collect(service.stub.Generate(generate_request([1], 4)))
        assert tokens == continuation([1], 4)
        session = service.stub.Session()
        await session.write(engine_pb2.SessionRequest(open=engine_pb2.OpenSession()))
        opened = await session.read()
        assert isinstance(opened, engine_pb2.SessionResponse)
        assert opened.opened.engine_epoch == "epoch-2"
        assert service.metric("up") == 1
        # Counters go on over the restart: 4 tokens before and 4 after it.
        assert service.metric("generated_tokens_total") == 8


async def test_load_and_metrics_return_to_idle_after_mixed_ends() -> None:
    """B141, B142: every gauge is at its idle value, outcomes sum up to the requests, tokens to the engine's."""
    async with scripted_service() as service:
        stop = continuation([7], 3)[2]
        await asyncio.gather(
            *(collect(service.stub.Generate(generate_request([7], 9, stop_token_ids=[stop]))) for _ in range(10)),
            *(collect(service.stub.Generate(generate_request([8], 6))) for _ in range(10)),
            *(failure(service.stub.Generate(generate_request([], 6))) for _ in range(10)),
        )
        service.worker.close_gate()
        cancelled = [service.stub.Generate(generate_request([9], 490)) for _ in range(10)]
        async with slow_steps(service):
            for call in cancelled:
                await call.read()
                call.cancel()
            await until(lambda: service.handle.num_live == 0)
        await until(lambda: service.metric("running_requests") == 0)
        outcomes = {
            tuple(sample.labels[name] for name in ("outcome", "code")): sample.value
            for metric in service.registry.collect()
            if metric.name == "tokenwire_engine_requests"
            for sample in metric.samples
            if sample.name.endswith("_total") and sample.value
        }
        assert outcomes == {
            ("stop", ""): 10,
            ("length", ""): 10,
            ("rejected", "invalid"): 10,
            ("abort", "cancelled"): 10,
        }
        load = await service.stub.GetLoad(engine_pb2.GetLoadRequest())
        assert (load.running_requests, load.waiting_requests, load.waiting_tokens, load.used_blocks) == (0, 0, 0, 0)
        assert load.free_blocks + load.cached_blocks == load.total_blocks == 256
        assert load.last_step_age.ToNanoseconds() > 0
        for gauge in ("running_requests", "waiting_requests", "waiting_tokens", "kv_cache_usage_ratio"):
            assert service.metric(gauge) == 0
        assert service.metric("generated_tokens_total") == load.generated_tokens_total >= 90
        assert service.total("step_seconds_count") == service.metric("step_tokens_count") == load.steps_total
        assert service.metric("request_samples_count") == 30
        assert service.metric("prefix_lookup_tokens_total") >= 30


@pytest.mark.parametrize("overlap", [False, True])
async def test_shared_prefixes_are_reported_as_cached(overlap: bool) -> None:
    prompt = list(range(1, 41))
    async with scripted_service(overlap=overlap) as service:
        _, cold = await collect(service.stub.Generate(generate_request(prompt, 4)))
        tokens, warm = await collect(service.stub.Generate(generate_request(prompt, 4)))
        salted = engine_pb2.GenerateRequest(request=token_request(prompt, 4))
        salted.request.cache_salt = "tenant"
        _, other = await collect(service.stub.Generate(salted))
    assert tokens == continuation(prompt, 4)
    assert cold.usage.cached_tokens == other.usage.cached_tokens == 0
    assert warm.usage.cached_tokens == 36


async def test_no_initial_metadata_before_the_first_token() -> None:
    async with scripted_service(gated=True) as service:
        call = service.stub.Generate(generate_request([1], 3))
        await until(lambda: service.handle.num_live == 1)
        metadata = asyncio.create_task(call.initial_metadata())
        done, _ = await asyncio.wait({metadata}, timeout=0.1)
        assert not done
        service.worker.open_gate()
        await asyncio.wait_for(metadata, WAIT_S)
        await collect(call)
