"""200 readers that stop reading for a minute: memory stays, the others notice nothing. By hand: `pytest -m load`.

The engine is simulated, so that its steps take the same time whatever else the machine does.
"""

import asyncio
import contextlib
import time
from pathlib import Path

import psutil
import pytest

from engine_service.simulated.capacity import quantile
from engine_service.simulated.step_model import StepModel
from tests.fixtures.stack import Stack, running_stack
from tokenwire_client import AsyncClient, Sampling

pytestmark = [pytest.mark.load, pytest.mark.slow, pytest.mark.timeout(400)]

STALLED_GRPC, STALLED_HTTP, OTHERS = 100, 100, 8
PAUSE_S, BEFORE_S = 60.0, 20.0
STEP = StepModel(0.020, 0.00002, 0.00001, 0.0, 0.0)
LONG = Sampling(max_tokens=3900, temperature=1.0, ignore_eos=True)
BODY = b'{"model":"hist","prompt":[5,6,7],"max_tokens":3900,"temperature":1,"ignore_eos":true,"stream":true}'


class Gaps:
    """Seconds between the messages of the streams that read, in two phases."""

    def __init__(self) -> None:
        self.before: list[float] = []
        self.during: list[float] = []
        self.is_stalled = False

    def add(self, seconds: float) -> None:
        (self.during if self.is_stalled else self.before).append(seconds)


class StoppableReader:
    """Reads all the time until it is told to stop, by gRPC or by HTTP."""

    def __init__(self) -> None:
        self.may_read = asyncio.Event()
        self.may_read.set()

    async def by_grpc(self, client: AsyncClient, started: asyncio.Semaphore) -> None:
        stream = client.generate([5, 6, 7], LONG)
        async with contextlib.aclosing(stream):
            async for _ in stream:
                started.release()
                await self.may_read.wait()

    async def by_http(self, port: int, started: asyncio.Semaphore) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=4096)
        headers = f"Host: x\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}"
        head = f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n\r\n"
        writer.write(head.encode() + BODY)
        try:
            assert b" 200 " in await reader.readline()
            while await reader.read(1024):
                started.release()
                await self.may_read.wait()
        finally:
            writer.close()


async def listen(client: AsyncClient, gaps: Gaps) -> None:
    last = 0.0
    async for _ in client.generate([8, 9], LONG):
        now = time.perf_counter()
        if last:
            gaps.add(now - last)
        last = now


def resident(stack: Stack, engine_pid: int) -> dict[int, int]:
    return {pid: psutil.Process(pid).memory_info().rss for pid in (stack.engine.pid, stack.tokenizer.pid, engine_pid)}


async def test_readers_that_stop_cost_neither_memory_nor_time(hist_folder: Path, tmp_path: Path) -> None:
    STEP.save(tmp_path / "step.json", {})
    flags = ("--simulate", str(tmp_path / "step.json"), "--max-num-requests", "256", "--kv-cache-memory", "2GiB")
    async with (
        running_stack(
            hist_folder, tmp_path, engine_flags=flags, tokenizer_flags=("--served-model-name", "hist")
        ) as stack,
        AsyncClient(stack.target) as slow_client,
        AsyncClient(stack.target) as client,
    ):
        engine_pid = (await stack.load()).engine_pid
        http_port = await stack.tokenizer.port("http_port")
        stoppable, started, gaps = StoppableReader(), asyncio.Semaphore(0), Gaps()
        tasks = [asyncio.create_task(stoppable.by_grpc(slow_client, started)) for _ in range(STALLED_GRPC)]
        tasks += [asyncio.create_task(stoppable.by_http(http_port, started)) for _ in range(STALLED_HTTP)]
        for _ in range(len(tasks)):
            await started.acquire()
        others = [asyncio.create_task(listen(client, gaps)) for _ in range(OTHERS)]
        await asyncio.sleep(BEFORE_S)  # the length of the measurement, not a synchronisation
        before = resident(stack, engine_pid)
        stoppable.may_read.clear()
        gaps.is_stalled = True
        await asyncio.sleep(PAUSE_S)
        after = resident(stack, engine_pid)
        assert (await stack.load()).running_requests == STALLED_GRPC + STALLED_HTTP + OTHERS
        for task in (*tasks, *others):
            task.cancel()
        await asyncio.gather(*tasks, *others, return_exceptions=True)
        await stack.until_idle(10.0)
    grown = {pid: (after[pid] - before[pid]) / 1e6 for pid in before}
    p99 = [quantile(sorted(part), 0.99) * 1e3 for part in (gaps.before, gaps.during)]
    print(f"grown {grown} MB; ITL p99 {p99[0]:.1f} ms before, {p99[1]:.1f} ms while they stopped")
    assert sum(grown.values()) < 50.0
    assert p99[1] < 1.2 * p99[0]
