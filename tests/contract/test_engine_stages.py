"""The last word on a sample says where its time went: durations of the engine process, in both RPC styles."""

import asyncio
import time

from google.protobuf.duration_pb2 import Duration

from tests.fixtures.engine_calls import (
    cancel,
    collect,
    generate_request,
    open_session,
    read_until_finished,
    submit,
    token_request,
    until,
)
from tests.fixtures.scripted_engine import SMALL, scripted_service
from tokenwire.engine.v1 import engine_pb2

STEP_S = 0.05
"""A step of the scripted engine ends when it is told to: never sooner after the token before."""


def seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9


async def test_the_stages_add_up_to_the_time_in_the_engine() -> None:
    async with scripted_service(gated=True) as service:
        begun = time.monotonic()
        call = service.stub.Generate(generate_request([1, 2, 3], 3))
        for _ in range(3):
            await asyncio.sleep(STEP_S)
            service.worker.allow()
            message = await call.read()
        passed = time.monotonic() - begun
    assert isinstance(message, engine_pb2.GenerateResponse)
    stages = message.finish.stages
    assert stages.HasField("prefill")
    assert seconds(stages.decode) >= 2 * STEP_S
    assert sum(map(seconds, (stages.queue, stages.prefill, stages.decode))) <= passed


async def test_a_stage_that_was_not_reached_is_unset_and_a_refusal_has_none() -> None:
    prompt = list(range(1, 1 + 2 * SMALL.prefill_chunk_size))
    async with scripted_service(gated=True) as service:
        call = await open_session(service)
        await submit(call, 1, token_request(prompt, 3))
        await submit(call, 2, token_request([], 3))
        await until(lambda: bool(service.worker.plans))
        await cancel(call, 1)
        await until(lambda: all(live.is_cut for live in service.handle._live.values()))
        service.worker.open_gate()
        finished = await read_until_finished(call, {1, 2})
    stages = finished[1][1].stages
    assert (stages.HasField("queue"), stages.HasField("prefill"), stages.HasField("decode")) == (True, True, False)
    assert not finished[2][1].HasField("stages")


async def test_preemptions_are_told() -> None:
    """Four requests of 40 tokens in a pool of 64: some give their blocks up, and each says how often it did."""
    async with scripted_service(gated=True, num_blocks=16, max_model_len=64) as service:
        calls = [service.stub.Generate(generate_request([1 + place] * 8, 32)) for place in range(4)]
        # All are there before the first has a token: one that came late would find the others' blocks free.
        await until(lambda: len(service.handle._live) == 4)
        service.worker.open_gate()
        finishes = [finish for _, finish in await asyncio.gather(*(collect(call) for call in calls))]
        counted = service.metric("preemptions_total")
    assert sum(finish.stages.preemptions for finish in finishes) == counted > 0
