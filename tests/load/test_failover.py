"""Engines killed again and again under load: nobody notices. Run by hand: `pytest -m load`."""

import asyncio
import itertools
from pathlib import Path

import pytest

from tests.fixtures.failover_load import Streams, assert_same
from tests.fixtures.fleet import Fleet, running_fleet
from tokenwire_client import NO_RETRIES, AsyncClient, Completion

pytestmark = [pytest.mark.load, pytest.mark.slow, pytest.mark.timeout(900)]

NUM_STREAMS = 64
LENGTH = 400
SECONDS = 60.0
KILL_EVERY_S = 5.0


async def test_64_streams_over_three_engines_of_which_one_is_killed_every_five_seconds(
    hist_folder: Path, tmp_path: Path
) -> None:
    """Acceptance 1: no stream fails, and every answer is that of an undisturbed run."""
    flags = ("--num-blocks", "4096", "--threads", "1")
    async with (
        running_fleet(hist_folder, tmp_path, 3, engine_flags=flags) as fleet,
        AsyncClient(fleet.target, retry=NO_RETRIES) as client,
    ):
        undisturbed = await Streams(client, NUM_STREAMS, LENGTH).run()
        end = asyncio.get_running_loop().time() + SECONDS
        killing = asyncio.create_task(_kill_in_turn(fleet, end))
        streams = Streams(client, NUM_STREAMS, LENGTH)
        answered = await asyncio.gather(*(_again_and_again(streams, place, end, undisturbed) for place in range(64)))
        kills = await killing
        metrics = await fleet.metrics()
        lost = await fleet.failovers("lost")
        print(f"{kills} kills, {sum(answered)} answers, {lost:.0f} failovers")
        assert kills >= SECONDS / KILL_EVERY_S / 2
        assert lost > 0
        assert not [name for name in metrics if "failed_failovers_total" in name and metrics[name]]
        await fleet.until_connected(3)
        for engine in fleet.engines:
            await engine.until_idle()


async def _kill_in_turn(fleet: Fleet, end: float) -> int:
    """How many were killed. The last one is spared: where engines start too slowly, there are fewer kills."""
    loop = asyncio.get_running_loop()
    for number in itertools.count():
        await asyncio.sleep(KILL_EVERY_S)
        while await fleet.num_connected() < 2 and loop.time() < end:  # noqa: ASYNC110 (nothing announces it)
            await asyncio.sleep(0.2)
        if loop.time() >= end:
            return number
        engine = fleet.engines[number % len(fleet.engines)]
        await engine.kill()
        engine.restart()
    raise AssertionError("endless")


async def _again_and_again(streams: Streams, place: int, end: float, undisturbed: list[tuple[Completion, ...]]) -> int:
    """One client: the same request until the time is up; how often it was answered, each time alike."""
    for number in itertools.count(1):
        assert_same([await streams.one(place)], [undisturbed[place]])
        if asyncio.get_running_loop().time() >= end:
            return number
    raise AssertionError("endless")
