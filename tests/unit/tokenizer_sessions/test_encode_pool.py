"""EncodePool: bounds, cancellation, failures, closing."""

import asyncio
import threading

import pytest

from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.sessions.encode_pool import EncodePool


class Gate:
    """Work that says that it runs, and waits."""

    def __init__(self) -> None:
        self.runs = threading.Event()
        self.opens = threading.Event()

    def __call__(self) -> str:
        self.runs.set()
        assert self.opens.wait(10)
        return "done"


async def held_pool(max_queued: int) -> tuple[EncodePool, Gate, "asyncio.Task[str | Refusal]"]:
    """A pool of one thread that is busy until the gate opens."""
    pool, gate = EncodePool(1, max_queued), Gate()
    task = asyncio.create_task(pool.run(gate))
    await asyncio.to_thread(gate.runs.wait, 10)
    return pool, gate, task


async def start(pool: EncodePool, count: int) -> list["asyncio.Task[int | Refusal]"]:
    tasks = [asyncio.create_task(pool.run(lambda number=number: number)) for number in range(count)]
    await asyncio.sleep(0)
    return tasks


@pytest.mark.parametrize("max_queued", [0, 1, 5])
async def test_exactly_the_queue_is_taken_and_the_rest_refused(max_queued: int) -> None:
    pool, gate, first = await held_pool(max_queued)
    tasks = await start(pool, max_queued)
    assert pool.num_queued == max_queued
    refusal = await pool.run(lambda: 7)
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.RESOURCE_EXHAUSTED
    assert refusal.retry_after_s is not None
    gate.opens.set()
    assert await asyncio.gather(*tasks) == list(range(max_queued))
    assert await first == "done"
    assert pool.num_queued == 0
    pool.close()


async def test_a_cancelled_job_leaves_the_queue_at_once_and_never_runs() -> None:
    pool, gate, first = await held_pool(1)
    ran: list[int] = []
    waiting = asyncio.create_task(pool.run(lambda: ran.append(1)))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.num_queued == 0
    (other,) = await start(pool, 1)
    gate.opens.set()
    assert await other == 0
    assert await first == "done"
    assert ran == []
    pool.close()


async def test_a_cancelled_running_job_frees_its_thread_when_it_ends() -> None:
    pool, gate, first = await held_pool(1)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    gate.opens.set()
    assert await pool.run(lambda: 3) == 3
    pool.close()


async def test_an_error_belongs_to_the_one_who_asked() -> None:
    pool = EncodePool(1, 1)
    with pytest.raises(ZeroDivisionError):
        await pool.run(lambda: 1 // 0)
    assert await pool.run(lambda: 4) == 4
    pool.close()


async def test_close_answers_everyone_who_waits() -> None:
    """B112: nobody is left waiting."""
    pool, gate, first = await held_pool(2)
    tasks = await start(pool, 2)
    closing = asyncio.create_task(asyncio.to_thread(pool.close))
    gate.opens.set()
    await closing
    answers = await asyncio.gather(*tasks)
    assert {answer.code for answer in answers if isinstance(answer, Refusal)} <= {RefusalCode.UNAVAILABLE}
    assert await first == "done"
    late = await pool.run(lambda: 1)
    assert isinstance(late, Refusal)
    assert late.code is RefusalCode.UNAVAILABLE
