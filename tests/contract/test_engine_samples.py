"""Several samples of a prompt, priorities and log probabilities over real sockets, with a scripted worker."""

import asyncio

import grpc
import pytest

from tests.fixtures.engine_calls import (
    cancel,
    collect,
    collect_samples,
    failure,
    generate_request,
    open_session,
    read_outputs,
    read_samples,
    slow_steps,
    submit,
    token_request,
    until,
)
from tests.fixtures.scripted_engine import continuation, scripted_service
from tokenwire.common.v1 import outcome_pb2
from tokenwire.engine.v1 import engine_pb2

LENGTH = outcome_pb2.FINISH_REASON_LENGTH
ABORT = outcome_pb2.FINISH_REASON_ABORT


@pytest.mark.parametrize("overlap", [False, True])
async def test_generate_gives_every_sample_its_tokens_finish_and_seed(overlap: bool) -> None:
    prompt = list(range(1, 40))
    async with scripted_service(overlap=overlap) as service:
        samples = await collect_samples(service.stub.Generate(generate_request(prompt, 9, n=3, seed=2**63 - 2)), 3)
        assert service.metric("requests_total", outcome="length", code="") == 1
        assert service.metric("prompt_tokens_total") == 39 + 2  # each other sample computes the last token alone
    assert [tokens for tokens, _ in samples] == [continuation(prompt, 9)] * 3
    assert [finish.seed for _, finish in samples] == [2**63 - 2, 2**63 - 1, -(2**63)]
    for _, finish in samples:
        usage = finish.usage
        assert finish.reason == LENGTH
        assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (39, 9, 0)


async def test_session_gives_every_sample_its_index() -> None:
    async with scripted_service() as service:
        call = await open_session(service)
        await submit(call, 7, token_request([1, 2, 3], 6, n=3))
        await submit(call, 8, token_request([4], 3))
        finished = await read_samples(call, {7: 3, 8: 1})
        assert [finished[7, index][0] for index in range(3)] == [continuation([1, 2, 3], 6)] * 3
        assert finished[8, 0][0] == continuation([4], 3)
        await submit(call, 7, token_request([9], 2, n=2))
        assert (await read_samples(call, {7: 2}))[7, 1][0] == continuation([9], 2)


async def test_a_handle_is_in_use_until_its_last_sample_has_ended() -> None:
    async with scripted_service(gated=True) as service:
        call = await open_session(service)
        await submit(call, 1, token_request([1], 300, n=2))
        await until(lambda: service.handle.num_live == 2)
        async with slow_steps(service):
            await call.write(engine_pb2.SessionRequest(cancel=engine_pb2.CancelRequest(handle=1, index=0)))
            await until(lambda: service.handle.num_live == 1)
            await submit(call, 1, token_request([2], 3))
            error = await failure(call)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: service.handle.num_live == 0)


async def test_cancel_ends_one_sample_or_all() -> None:
    async with scripted_service(gated=True) as service:
        call = await open_session(service)
        await submit(call, 1, token_request([1], 300, n=3))
        await until(lambda: service.handle.num_live == 3)
        async with slow_steps(service):
            for index in (1, 99):
                await call.write(engine_pb2.SessionRequest(cancel=engine_pb2.CancelRequest(handle=1, index=index)))
            ended: dict[int, engine_pb2.Finish] = {}
            while not ended:
                ended |= {
                    output.index: output.finish for output in await read_outputs(call) if output.HasField("finish")
                }
            assert [(index, finish.reason) for index, finish in ended.items()] == [(1, ABORT)]
            await cancel(call, 1)
            while len(ended) < 3:
                ended |= {
                    output.index: output.finish for output in await read_outputs(call) if output.HasField("finish")
                }
        assert {finish.reason for finish in ended.values()} == {ABORT}
        assert {finish.error.grpc_code for finish in ended.values()} == {grpc.StatusCode.CANCELLED.value[0]}
        await until(lambda: service.metric("kv_blocks", state="used") == 0)


async def test_abort_by_name_and_the_end_of_the_call_end_all_samples() -> None:
    async with scripted_service(gated=True) as service:
        named = service.stub.Generate(generate_request([1], 300, "a", n=4))
        left = service.stub.Generate(generate_request([2], 300, "b", n=4))
        await until(lambda: service.handle.num_live == 8)
        async with slow_steps(service):
            await service.stub.Abort(engine_pb2.AbortRequest(request_ids=["a"]))
            assert service.handle.num_live == 4
            assert (await failure(named)).code() is grpc.StatusCode.CANCELLED
            left.cancel()
            await until(lambda: service.handle.num_live == 0)
        assert service.metric("requests_total", outcome="abort", code="cancelled") == 2
        await until(lambda: service.metric("kv_blocks", state="used") == 0)


async def test_samples_that_the_queue_can_never_hold_are_refused_together() -> None:
    """For good: "try again later" would be a lie."""
    async with scripted_service(max_waiting_requests=8) as service:
        error = await failure(service.stub.Generate(generate_request([1], 3, n=9)))
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "n 9 exceeds the 8 requests that may wait"
        assert service.metric("requests_total", outcome="rejected", code="invalid") == 1
        samples = await collect_samples(service.stub.Generate(generate_request([1], 3, n=8)), 8)
        assert [tokens for tokens, _ in samples] == [continuation([1], 3)] * 8


async def test_more_samples_than_may_run_take_turns() -> None:
    async with scripted_service(max_num_requests=3) as service:
        samples = await collect_samples(service.stub.Generate(generate_request([1, 2, 3, 4, 5], 4, n=20)), 20)
        assert [tokens for tokens, _ in samples] == [continuation([1, 2, 3, 4, 5], 4)] * 20
        assert max(len(plan.chunks) for plan in service.worker.plans) == 3


async def test_waiting_requests_are_taken_by_priority_then_arrival() -> None:
    async with scripted_service(gated=True, max_num_requests=1) as service:
        call = await open_session(service)
        priorities = {1: 0, 2: 5, 3: 0, 4: -1, 5: 5, 6: -(2**31)}
        for handle, priority in priorities.items():
            message = token_request([handle], 2)
            message.priority = priority
            await submit(call, handle, message)
            if handle == 1:
                await until(lambda: len(service.worker.plans) == 1)
        await until(lambda: service.handle.num_live == 6)
        service.worker.open_gate()
        order: list[int] = []
        while len(order) < 6:
            order += [output.handle for output in await read_outputs(call) if output.HasField("finish")]
        assert order == [1, 6, 4, 3, 2, 5]


async def test_a_request_of_one_sample_is_not_disturbed_by_many() -> None:
    async with scripted_service() as service:
        many = [service.stub.Generate(generate_request([n, 1], 30, n=5)) for n in range(1, 6)]
        one = service.stub.Generate(generate_request([50, 51], 40))
        assert (await collect(one))[0] == continuation([50, 51], 40)
        for number, samples in enumerate(await asyncio.gather(*(collect_samples(call, 5) for call in many)), start=1):
            assert [tokens for tokens, _ in samples] == [continuation([number, 1], 30)] * 5


@pytest.mark.parametrize("overlap", [False, True])
async def test_a_request_resumed_after_any_token_gives_the_rest(overlap: bool) -> None:
    """Its finish counts the whole completion; what was found in the cache is told with its first token."""
    prompt = list(range(1, 20))
    whole = continuation(prompt, 9)
    async with scripted_service(overlap=overlap) as service:
        call = await open_session(service)
        for count in range(9):
            message = token_request(prompt, 9)
            message.resumed_token_ids.extend(whole[:count])
            await submit(call, count + 1, message)
            outputs: list[engine_pb2.RequestOutput] = []
            while not outputs or not outputs[-1].HasField("finish"):
                outputs += await read_outputs(call)
            assert [token for output in outputs for token in output.token_ids] == whole[count:]
            usage = outputs[-1].finish.usage
            cached = 0 if count == 0 else 16 if count == 1 else 19
            assert (usage.prompt_tokens, usage.completion_tokens) == (19, 9)
            assert [output.cached_tokens for output in outputs] == [usage.cached_tokens] + [0] * (len(outputs) - 1)
            assert usage.cached_tokens == cached


async def test_a_resumed_request_that_is_cut_or_aborted_counts_all_its_tokens() -> None:
    async with scripted_service(gated=True) as service:
        call = await open_session(service)
        message = token_request([1, 2], 300)
        message.resumed_token_ids.extend(continuation([1, 2], 5))
        await submit(call, 1, message)
        service.worker.allow(1)
        assert [list(output.token_ids) for output in await read_outputs(call)] == [continuation([1, 2], 6)[5:]]
        await cancel(call, 1)
        service.worker.open_gate()
        count = 6  # more may come before the engine has the cancel
        while not (output := (await read_outputs(call))[-1]).HasField("finish"):
            count += len(output.token_ids)
        count += len(output.token_ids)
        assert (output.finish.reason, output.finish.usage.completion_tokens) == (ABORT, count)
