"""An engine that speculates is killed under streams that copy their prompts: every text goes on as it must.

The reference is the model's rule itself: it answers to each token with the next number.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.fixtures.checkpoints import succ_continuation
from tests.fixtures.fleet import Fleet, FleetEngine, running_fleet
from tokenwire_client import NO_RETRIES, AsyncClient, Completion, Sampling

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

NUM_STREAMS = 8
LENGTH = 2000
ENGINE_FLAGS = ("--num-blocks", "8192", "--threads", "1", "--speculation", "prompt-lookup")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(succ_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with running_fleet(succ_folder, tmp_path_factory.mktemp("fleet"), 2, engine_flags=ENGINE_FLAGS) as fleet:
        yield fleet


def first_token(place: int) -> int:
    """Of ranges that neither overlap (no stream finds what it copies in another's blocks) nor touch SUCC's script."""
    return 24_000 + place * (LENGTH + 50)


async def copied(client: AsyncClient, place: int, begun: asyncio.Semaphore) -> Completion:
    """The prompt holds the whole answer; `begun` is released at the first delta."""
    start = first_token(place)
    prompt = [*range(start, start + LENGTH + 1), start]
    greedy = place % 2 == 0
    stream = client.generate(prompt, Sampling(temperature=0.0 if greedy else 1.0, seed=place, max_tokens=LENGTH))
    is_first = True
    async for _ in stream:
        if is_first:
            is_first = False
            begun.release()
    return await stream.result()


async def all_copied(client: AsyncClient, begun: asyncio.Semaphore) -> list[Completion]:
    return list(await asyncio.gather(*(copied(client, place, begun) for place in range(NUM_STREAMS))))


async def accepted(engine: FleetEngine) -> float:
    url = f"http://127.0.0.1:{await engine.service.port('metrics_port')}/metrics"
    async with httpx.AsyncClient() as http:
        lines = (await http.get(url)).text.splitlines()
    name = "tokenwire_engine_speculation_accepted_tokens_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


async def test_a_killed_engine_with_drafts_is_not_noticed(fleet: Fleet) -> None:
    begun = asyncio.Semaphore(0)
    async with AsyncClient(fleet.target, retry=NO_RETRIES) as client:
        task = asyncio.create_task(all_copied(client, begun))
        for _ in range(NUM_STREAMS):
            await begun.acquire()
        loads = [(await engine.load()).running_requests for engine in fleet.engines]
        killed = fleet.engines[loads.index(max(loads))]
        (other,) = (engine for engine in fleet.engines if engine is not killed)
        assert await accepted(killed) > 0
        before = await accepted(other)
        await killed.kill()
        disturbed = await asyncio.wait_for(task, 120)
        assert await fleet.failovers("lost") > 0
        assert await accepted(other) > before
        undisturbed = await all_copied(client, asyncio.Semaphore(0))
    for place, (one, same) in enumerate(zip(disturbed, undisturbed, strict=True)):
        assert list(one.token_ids) == succ_continuation(first_token(place), LENGTH)
        assert (one.text, one.finish_reason, one.usage.completion_tokens) == (
            same.text,
            same.finish_reason,
            same.usage.completion_tokens,
        )
