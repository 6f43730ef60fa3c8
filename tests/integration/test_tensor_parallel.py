"""A rank of a tensor parallel engine killed under running streams: they go on elsewhere, with the same text."""

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from tests.fixtures.failover_load import Streams, assert_same
from tests.fixtures.fleet import FleetEngine, running_fleet
from tokenwire_client import NO_RETRIES, AsyncClient

NUM_STREAMS = 8
LENGTH = 500
FLAGS = ("--tensor-parallel-size", "2", "--device", "cpu", "--num-blocks", "1024", "--threads", "2")


def rank_pid(engine: FleetEngine) -> int:
    lines = (line for line in engine.log.read_text().splitlines() if line.startswith("{"))
    (pids,) = [event["pids"] for event in map(json.loads, lines) if event["event"] == "ranks started"]
    return int(pids[0])


@pytest.mark.slow
async def test_a_killed_rank_is_not_noticed(hist_folder: Path, tmp_path: Path) -> None:
    async with (
        running_fleet(hist_folder, tmp_path, 2, engine_flags=FLAGS) as fleet,
        AsyncClient(fleet.target, retry=NO_RETRIES) as client,
    ):
        undisturbed = await Streams(client, NUM_STREAMS, LENGTH).run()
        streams = Streams(client, NUM_STREAMS, LENGTH)
        task = asyncio.create_task(streams.run())
        await streams.has_begun.wait()
        assert not task.done()
        running = [(await engine.load()).running_requests for engine in fleet.engines]
        engine = fleet.engines[running.index(max(running))]
        os.kill(rank_pid(engine), signal.SIGKILL)
        assert await engine.service.wait() == 1
        assert_same(await asyncio.wait_for(task, 120), undisturbed)
        metrics = await fleet.metrics()
        assert sum(value for name, value in metrics.items() if "failovers_total" in name) > 0, metrics
