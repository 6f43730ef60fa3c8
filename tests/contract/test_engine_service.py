"""EngineService over real sockets, with the real scheduler, loop and mailbox and a scripted worker."""

import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.fixtures.engine_calls import (
    WAIT_S,
    collect,
    collect_samples,
    details,
    failure,
    generate_request,
    open_session,
    read_samples,
    read_until_finished,
    slow_steps,
    submit,
    token_request,
    until,
)
from tests.fixtures.hostile_token_requests import CASES, Case
from tests.fixtures.scripted_engine import continuation, scripted_service
from tokenwire.common.v1 import outcome_pb2
from tokenwire.engine.v1 import engine_pb2


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
