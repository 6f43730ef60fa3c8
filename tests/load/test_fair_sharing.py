"""Acceptance: a tenant at ten times its share beside one at its own; weights. Real services. By hand: `pytest -m load`.

The engine takes the step times of a 135M model on two cores (see docs/simulated.md), so that the figures are those of
the scheduling and not of this machine's load; TOKENWIRE_TEST_COMPUTES=1: it computes.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine_service.simulated.step_model import StepModel
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.fixtures.stack import Stack
from tests.fixtures.tenant_load import Load, client_of, loops, percentile, tenant_stack

pytestmark = [pytest.mark.load, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(1800)]

STEPS = None if os.environ.get("TOKENWIRE_TEST_COMPUTES") else StepModel(0.010, 0.0005, 0.0006, 2e-7, 1e-7)
SLOTS, PROMPT, OUTPUT, VOCABULARY = 8, 128, 32, 49_000
ROUNDS, ROUND_S, WARM_UP_S = 4, 20.0, 4.0


@contextlib.asynccontextmanager
async def serving(folder: Path, weights: dict[str, int], slots: int) -> AsyncIterator[Stack]:
    model = resolve_model_folder(DEFAULT_MODEL)
    async with tenant_stack(model, folder, weights, STEPS, "--max-num-requests", str(slots)) as stack:
        yield stack


@contextlib.asynccontextmanager
async def arrivals(load: Load, per_s: float) -> AsyncIterator[None]:
    """Requests at random times until the end of the block."""
    tasks: set[asyncio.Task[None]] = set()

    async def send() -> None:
        while True:
            await asyncio.sleep(load.dice.expovariate(per_s))
            tasks.add(asyncio.create_task(load.one()))

    sender = asyncio.create_task(send())
    try:
        yield
    finally:
        sender.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(sender, *tasks, return_exceptions=True)


async def capacity(stack: Stack) -> float:
    """Requests that a flood is served in a second."""
    async with client_of(stack, "a") as flood:
        load = Load(flood, PROMPT, OUTPUT, VOCABULARY)
        async with loops(load, 5 * SLOTS):
            await asyncio.sleep(WARM_UP_S)
            before = len(load.ttfts)
            await asyncio.sleep(ROUND_S)
            served = len(load.ttfts) - before
    await stack.until_idle(10.0)
    return served / ROUND_S


async def measured(stack: Stack, per_s: float, with_flood: bool) -> list[float]:
    """Seconds to the first tokens of b; beside 40 clients of a, who are ten times its share of 8 slots, or alone."""
    async with client_of(stack, "a") as flood, client_of(stack, "b") as other, contextlib.AsyncExitStack() as running:
        load = Load(other, PROMPT, OUTPUT, VOCABULARY)
        if with_flood:
            await running.enter_async_context(loops(Load(flood, PROMPT, OUTPUT, VOCABULARY), 5 * SLOTS))
        await running.enter_async_context(arrivals(load, per_s))
        await asyncio.sleep(WARM_UP_S)
        load.ttfts.clear()
        await asyncio.sleep(ROUND_S)
        found = list(load.ttfts)
    await stack.until_idle(10.0)
    return found


async def test_a_flood_leaves_the_other_tenant_its_time_to_first_token(tmp_path: Path) -> None:
    """TTFT p99 of b beside a within 1.5 times of b's alone; b asks for four fifths of its share. Rounds alternate."""
    alone: list[float] = []
    beside: list[float] = []
    async with serving(tmp_path, {"a": 1, "b": 1}, SLOTS) as stack:
        per_s = 0.8 * await capacity(stack) / 2
        for _ in range(ROUNDS):
            alone += await measured(stack, per_s, False)
            beside += await measured(stack, per_s, True)
    figures = {
        name: {f"p{part * 100:.0f}": round(1e3 * percentile(values, part), 1) for part in (0.5, 0.9, 0.99)}
        | {"requests": len(values)}
        for name, values in (("alone", alone), ("beside", beside))
    }
    print("TTFT of b, ms:", figures)
    assert min(len(alone), len(beside)) >= 100
    assert percentile(beside, 0.99) <= 1.5 * percentile(alone, 0.99), figures


async def test_weights_are_respected_within_ten_percent(tmp_path: Path) -> None:
    """Generated tokens of three tenants with weights 1, 2, 4, each with more clients than slots."""
    weights = {"a": 1, "b": 2, "c": 4}
    async with serving(tmp_path, weights, 14) as stack, contextlib.AsyncExitStack() as running:
        loads = {}
        for name in weights:
            client = await running.enter_async_context(client_of(stack, name))
            loads[name] = Load(client, 16, 64, VOCABULARY)
            await running.enter_async_context(loops(loads[name], 20))
        await asyncio.sleep(2 * WARM_UP_S)
        before = {name: load.tokens for name, load in loads.items()}
        await asyncio.sleep(3 * ROUND_S)
        tokens = {name: load.tokens - before[name] for name, load in loads.items()}
    part = sum(tokens.values()) / sum(weights.values())
    shares = {name: round(tokens[name] / part, 3) for name in weights}
    print("tokens per weight unit:", tokens, shares)
    assert list(shares.values()) == pytest.approx(list(weights.values()), rel=0.1), tokens
