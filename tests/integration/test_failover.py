"""Engines killed, stopped and drained under running streams: no stream fails, and every answer is the same.

The reference is the same requests undisturbed, on float32.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.fixtures.failover_load import Streams, assert_same
from tests.fixtures.fleet import Fleet, FleetEngine, running_fleet
from tokenwire_client import NO_RETRIES, AsyncClient, Completion

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_STREAMS = 16
LENGTH = 500
HANG_S = 4.0
Answers = list[tuple[Completion, ...]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(hist_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    engine_flags = ("--num-blocks", "2048", "--drain-timeout", "0.05", "--threads", "1")
    tokenizer_flags = ("--engine-hang-timeout", str(HANG_S))
    async with running_fleet(
        hist_folder,
        tmp_path_factory.mktemp("fleet"),
        2,
        engine_flags=engine_flags,
        tokenizer_flags=tokenizer_flags,
    ) as fleet:
        yield fleet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def undisturbed(fleet: Fleet) -> Answers:
    async with AsyncClient(fleet.target) as client:
        return await Streams(client, NUM_STREAMS, LENGTH).run()


async def running(fleet: Fleet, client: AsyncClient) -> "asyncio.Task[Answers]":
    """The streams, each past its first delta."""
    await fleet.until_connected(2)
    streams = Streams(client, NUM_STREAMS, LENGTH)
    task = asyncio.create_task(streams.run())
    await streams.has_begun.wait()
    assert not task.done()
    return task


async def loaded(fleet: Fleet) -> FleetEngine:
    """An engine that runs some of them."""
    loads = [(await engine.load()).running_requests for engine in fleet.engines]
    assert max(loads) > 0
    return fleet.engines[loads.index(max(loads))]


async def test_a_killed_engine_is_not_noticed(fleet: Fleet, undisturbed: Answers) -> None:
    async with AsyncClient(fleet.target, retry=NO_RETRIES) as client:
        task = await running(fleet, client)
        engine = await loaded(fleet)
        await engine.kill()
        assert_same(await asyncio.wait_for(task, 60), undisturbed)
    assert await fleet.failovers("lost") > 0
    engine.restart()


@pytest.mark.slow
async def test_a_drain_past_its_grace_is_not_noticed(fleet: Fleet, undisturbed: Answers) -> None:
    async with AsyncClient(fleet.target, retry=NO_RETRIES) as client:
        task = await running(fleet, client)
        engine = await loaded(fleet)
        engine.service.signal(signal.SIGTERM)
        assert await engine.service.wait() == 0
        assert_same(await asyncio.wait_for(task, 60), undisturbed)
    assert await fleet.failovers("ended") > 0
    engine.restart()


@pytest.mark.slow
async def test_a_stopped_engine_is_left_and_frees_its_blocks_when_it_wakes(fleet: Fleet, undisturbed: Answers) -> None:
    async with AsyncClient(fleet.target, retry=NO_RETRIES) as client:
        task = await running(fleet, client)
        engine = await loaded(fleet)
        pids = await engine.pids()
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        begin = asyncio.get_running_loop().time()
        try:
            while await fleet.failovers("hang") == 0:
                await asyncio.sleep(0.1)
                assert asyncio.get_running_loop().time() - begin < 2 * HANG_S
            assert_same(await asyncio.wait_for(task, 60), undisturbed)
        finally:
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
        await engine.until_idle()
        await fleet.until_connected(2)
    assert "Traceback" not in fleet.tokenizer.log.read_text()
