"""One tenant floods the stack, another sends a request now and then: over sockets, counted in steps."""

import asyncio
from pathlib import Path

import pytest

from engine_service.simulated.step_model import StepModel
from tests.fixtures.stack import Stack, until
from tests.fixtures.tenant_load import Load, client_of, loops, tenant_stack
from tokenwire_client import AsyncClient, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")
VOCABULARY = 500


async def steps_to_first_token(client: AsyncClient, clock: list[int]) -> int:
    """`clock` counts the tokens of a stream that runs meanwhile: one in each step."""
    before = clock[0]
    async with client.generate([5, 6, 7], Sampling(max_tokens=4, ignore_eos=True)) as stream:
        async for _ in stream:
            return clock[0] - before
    raise AssertionError("no token came")


async def tick(client: AsyncClient, clock: list[int]) -> None:
    async for delta in client.generate([9], Sampling(max_tokens=500, ignore_eos=True)):
        clock[0] += len(delta.token_ids)


async def flooded(stack: Stack) -> tuple[list[int], int]:
    """Steps to the first tokens of b's requests, and to that of one more of a's."""
    clock = [0]
    async with client_of(stack, "a") as flood, client_of(stack, "b") as other:
        await steps_to_first_token(other, clock)  # b is present
        async with loops(Load(flood, 8, 30, VOCABULARY), 40):
            ticking = asyncio.create_task(tick(other, clock))
            await until(lambda: clock[0] > 0, 10.0)
            await until(lambda: _waits(stack), 10.0)
            await steps_to_first_token(other, clock)  # from then on a slot is kept free for b
            waited = [await steps_to_first_token(other, clock) for _ in range(12)]
            own = await steps_to_first_token(flood, clock)
            ticking.cancel()
            await asyncio.gather(ticking, return_exceptions=True)
    return waited, own


async def _waits(stack: Stack) -> bool:
    return (await stack.load()).waiting_requests > 20


async def test_a_flood_of_ten_times_the_share_keeps_nobody_else_waiting(hist_folder: Path, tmp_path: Path) -> None:
    """8 slots: 4 are b's share, and 40 of a's requests at a time are ten times a's. b waits for a few steps, while a
    request of a's own waits for its turn behind 32 others."""
    steps = StepModel(0.03, 0.0, 0.0, 0.0, 0.0)
    async with tenant_stack(hist_folder, tmp_path, {"a": 1, "b": 1}, steps, "--max-num-requests", "8") as stack:
        waited, own = await flooded(stack)
        # Client and services share the machine's cores with other tests: a step more or less is theirs.
        assert sorted(waited)[len(waited) // 2] <= 8, waited
        assert own > 5 * sorted(waited)[len(waited) // 2], (own, waited)
        assert own > 40, own
        await stack.until_idle(5.0)
        metrics = await stack.metrics(stack.tokenizer)
        assert metrics["tokenwire_tokenizer_tenant_tokens_in_flight{tenant=a}"] == 0
        assert metrics["tokenwire_tokenizer_tenant_active_requests{tenant=b}"] == 0
