"""Soaks: thousands of short requests and cancels leave memory where it was. Run by hand: `pytest -m load`."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from tests.fixtures.stack import ServiceProcess, Stack, until
from tests.integration.probes import FOREVER, assert_alive, forever
from tokenwire_client import AsyncClient

pytestmark = [pytest.mark.load, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]

WAVE = 500


def _anonymous_bytes(pids: tuple[int, ...]) -> dict[int, int]:
    """RssAnon + swap of each process."""
    return {pid: psutil.Process(pid).memory_full_info().uss for pid in pids}


async def _pids(stack: Stack) -> tuple[int, ...]:
    return (stack.engine.pid, stack.tokenizer.pid, (await stack.load()).engine_pid)


async def _grown(stack: Stack, waves: int, wave: Callable[[AsyncClient], Awaitable[None]]) -> dict[int, float]:
    """Growth of each process over `waves` waves after two for warm-up, as a ratio."""
    pids = await _pids(stack)
    async with AsyncClient(stack.target) as client:
        for _ in range(2):
            await wave(client)
        before = _anonymous_bytes(pids)
        for _ in range(waves):
            await wave(client)
        await stack.until_idle(5.0)
        after = _anonymous_bytes(pids)
        await assert_alive(client)
    assert pids == await _pids(stack)
    return {pid: after[pid] / before[pid] - 1 for pid in pids}


async def _short_requests(client: AsyncClient) -> None:
    await asyncio.gather(*(client.generate(FOREVER, forever(1)).result() for _ in range(WAVE)))


async def _cancelled_requests(client: AsyncClient) -> None:
    async def one(index: int) -> None:
        stream = client.generate(FOREVER, forever(8000))
        if index % 2:
            async for _ in stream:
                break
        await stream.aclose()

    for start in range(0, WAVE, 50):
        await asyncio.gather(*(one(start + i) for i in range(50)))


async def test_twenty_thousand_requests_leave_memory_flat(succ_stack: Stack) -> None:
    """B139: 20,000 requests of one token, then 64 of 3,000 tokens: growth below 5 %."""
    growth = await _grown(succ_stack, 40, _short_requests)
    assert max(growth.values()) < 0.05, growth
    async with AsyncClient(succ_stack.target) as client:
        await asyncio.gather(*(client.generate(FOREVER, forever(3000)).result() for _ in range(4)))
        before = _anonymous_bytes(await _pids(succ_stack))
        await asyncio.gather(*(client.generate(FOREVER, forever(3000)).result() for _ in range(64)))
        after = _anonymous_bytes(await _pids(succ_stack))
    assert max(after[pid] / before[pid] for pid in before) < 1.05


async def test_twenty_thousand_cancels_leak_nothing(succ_stack: Stack) -> None:
    """B111: below 1 kB per cancelled stream in every process."""
    pids = await _pids(succ_stack)
    async with AsyncClient(succ_stack.target) as client:
        for _ in range(4):
            await _cancelled_requests(client)
        before = _anonymous_bytes(pids)
        for _ in range(40):
            await _cancelled_requests(client)
        await succ_stack.until_idle(5.0)
        after = _anonymous_bytes(pids)
    assert max(after[pid] - before[pid] for pid in pids) < 40 * WAVE * 1024
    assert succ_stack.errors_logged() == []


async def test_eight_engines_start_side_by_side(hist_folder: Path, tmp_path: Path) -> None:
    """B121: nothing hangs when many services start their engine processes at the same time."""
    for turn in range(2):
        services = [
            ServiceProcess(
                "engine_service", tmp_path / f"{turn}-{i}.log", "--model", str(hist_folder), "--num-blocks", "64"
            )
            for i in range(8)
        ]
        try:
            await asyncio.gather(*(service.port() for service in services))
            await asyncio.gather(*(_until_ready(service) for service in services))
        finally:
            await asyncio.gather(*(service.close() for service in services))


async def _until_ready(service: ServiceProcess) -> None:
    await until(lambda: bool(service.events("engine ready")), 120)
