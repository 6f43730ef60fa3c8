"""Leaving, cancelling, deadlines and killed clients: the request is gone within a step, its blocks are free."""

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.fixtures.stack import Stack, running_stack, until
from tests.integration.probes import FOREVER, assert_alive, forever, forever_ids
from tokenwire.engine.v1 import engine_pb2
from tokenwire_client import AsyncClient, Sampling
from tokenwire_client.errors import DeadlineExceeded, Overloaded, TokenwireError

pytestmark = pytest.mark.asyncio(loop_scope="module")

STREAM_FOREVER = """
import sys
from tokenwire_client import Client, Sampling
with Client(sys.argv[1]) as client:
    for delta in client.generate([1000], Sampling(temperature=0.0, max_tokens=8000)):
        print(len(delta.text), flush=True)
"""


@pytest_asyncio.fixture(loop_scope="module")
async def client(succ_stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(succ_stack.target) as client:
        yield client


async def test_leaving_a_stream_frees_its_blocks_at_once(succ_stack: Stack, client: AsyncClient) -> None:
    async for _ in client.generate(FOREVER, forever(8000)):
        assert (await succ_stack.load()).running_requests == 1
        break
    await succ_stack.until_idle(1.0)


async def test_nothing_is_computed_for_a_cancelled_request(succ_stack: Stack, client: AsyncClient) -> None:
    """The engine takes no step any more once it is idle (see test_engine_cancel for the step of the cancel)."""
    stream = client.generate(FOREVER, forever(8000))
    async for _ in stream:
        break
    load = await succ_stack.until_idle(1.0)
    settled = load.steps_total
    await asyncio.sleep(0.2)  # not a synchronisation: time for a step that must not come
    assert (await succ_stack.load()).steps_total == settled


async def test_a_passed_deadline_is_named_and_frees_the_blocks(succ_stack: Stack, client: AsyncClient) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.generate(FOREVER, forever(8000), timeout=0.5).result()
    await succ_stack.until_idle(1.0)


async def test_a_killed_client_is_noticed_within_a_second(succ_stack: Stack) -> None:
    """Acceptance 4: `kill -9` of a client in mid-stream."""
    process = subprocess.Popen([sys.executable, "-c", STREAM_FOREVER, succ_stack.target], stdout=subprocess.PIPE)
    assert process.stdout is not None
    await asyncio.to_thread(process.stdout.readline)
    assert (await succ_stack.load()).used_blocks > 0
    process.send_signal(signal.SIGKILL)
    process.wait()
    await succ_stack.until_idle(1.0)


async def test_abort_by_id_is_idempotent_and_final(succ_stack: Stack) -> None:
    """B038, B039: unknown, twice, finished, 256 at once; no token after the answer."""
    stub = succ_stack.engine_stub
    request = engine_pb2.TokenRequest(request_id="mine", prompt_token_ids=FOREVER)
    request.sampling.max_tokens = 8000
    call = stub.Generate(engine_pb2.GenerateRequest(request=request))
    await call.read()
    for ids in (["nobody"], ["mine"], ["mine"], [f"r{i}" for i in range(256)]):
        await stub.Abort(engine_pb2.AbortRequest(request_ids=ids))
    await succ_stack.until_idle(1.0)


async def test_two_thousand_requests_half_of_them_cancelled(succ_stack: Stack, client: AsyncClient) -> None:
    """Acceptance 4: afterwards every block is free, memory is flat, every pid is the same, every gauge is idle."""
    chooser = random.Random(4)
    pids = (succ_stack.engine.pid, succ_stack.tokenizer.pid, (await succ_stack.load()).engine_pid)
    await _wave(client, chooser, 500)  # warm-up: pools, arenas and caches reach their size
    before = _memory(pids)
    for _ in range(4):
        await _wave(client, chooser, 500)
    load = await succ_stack.until_idle(1.0)
    assert load.free_blocks + load.cached_blocks == load.total_blocks
    assert pids == (succ_stack.engine.pid, succ_stack.tokenizer.pid, load.engine_pid)
    growth = {pid: _memory(pids)[pid] - before[pid] for pid in pids}
    assert max(growth.values()) < 12 << 20, growth
    for service, gauges in (
        (succ_stack.engine, ("tokenwire_engine_running_requests", "tokenwire_engine_waiting_requests")),
        (succ_stack.tokenizer, ("tokenwire_tokenizer_active_requests",)),
    ):
        metrics = await succ_stack.metrics(service)
        assert {name: metrics[name] for name in gauges} == dict.fromkeys(gauges, 0.0)
    assert succ_stack.errors_logged() == []  # B123
    await assert_alive(client)


async def _wave(client: AsyncClient, chooser: random.Random, count: int) -> None:
    await asyncio.gather(*(_one(client, chooser.randint(0, 12) if i % 2 else None) for i in range(count)))


async def _one(client: AsyncClient, leave_after: int | None) -> None:
    """A stream of 12 tokens, left after that many deltas (0: before the first)."""
    stream = client.generate(FOREVER, forever(12))
    if leave_after is None:
        assert (await stream.result()).token_ids == forever_ids(12)
        return
    if leave_after > 0:
        seen = 0
        async for _ in stream:
            seen += 1
            if seen == leave_after:
                break
    await stream.aclose()


def _memory(pids: tuple[int, ...]) -> dict[int, int]:
    return {pid: psutil.Process(pid).memory_info().rss for pid in pids}


async def test_a_queued_request_that_is_left_is_never_computed(succ_folder: Path, tmp_path: Path) -> None:
    """B035, and queue full with a retry delay (one runs, two wait, the next is refused)."""
    flags = ("--num-blocks", "1024", "--max-num-requests", "1", "--max-waiting-requests", "2")
    async with (
        running_stack(succ_folder, tmp_path, engine_flags=flags) as stack,
        AsyncClient(stack.target) as client,
    ):
        running = client.generate(FOREVER, forever(8000))
        async for _ in running:
            assert (await stack.load()).running_requests == 1
            left = client.generate([*range(5000, 5200)], Sampling(max_tokens=5))
            kept = client.generate([2000], forever(3))
            await until(lambda: _waits(stack, 2), 5.0)
            with pytest.raises(Overloaded) as refusal:
                await client.generate([3000], forever(1), timeout=10).result()
            assert (refusal.value.retry_after or 0) > 0
            prompt_tokens = (await stack.load()).prompt_tokens_total
            await left.aclose()
            await until(lambda: _waits(stack, 1), 5.0)
            break
        assert (await kept.result()).token_ids == (2001, 2002, 2003)
        load = await stack.until_idle(1.0)
        assert load.prompt_tokens_total == prompt_tokens + 1


async def _waits(stack: Stack, count: int) -> bool:
    return (await stack.load()).waiting_requests == count


async def test_all_slots_run_again_after_many_cancels(succ_stack: Stack, client: AsyncClient) -> None:
    """B043: after 10 x max_num_requests cancels every slot can still run at the same time."""
    for _ in range(10):
        streams = [client.generate(FOREVER, forever(8000)) for _ in range(64)]
        await asyncio.gather(*(stream.aclose() for stream in streams))
    streams = [client.generate(FOREVER, forever(200)) for _ in range(64)]
    tasks = [asyncio.create_task(stream.result()) for stream in streams]
    await until(lambda: _runs(succ_stack, 64), 5.0)
    assert {completion.token_ids for completion in await asyncio.gather(*tasks)} == {forever_ids(200)}


async def _runs(stack: Stack, count: int) -> bool:
    return (await stack.load()).running_requests == count


async def test_mixed_endings_are_counted_once_each(succ_stack: Stack, client: AsyncClient) -> None:
    """B141, B142: outcomes add up, token counters agree with what clients got."""
    await until(lambda: _has_no_active_requests(succ_stack), 5.0)
    before = await succ_stack.metrics(succ_stack.tokenizer)
    results = await asyncio.gather(*(_ending(client, i) for i in range(100)), return_exceptions=True)
    assert not [r for r in results if isinstance(r, BaseException) and not isinstance(r, TokenwireError)]
    await succ_stack.until_idle(1.0)

    async def all_counted() -> bool:
        after = await succ_stack.metrics(succ_stack.tokenizer)
        name = "tokenwire_tokenizer_requests_total"
        counted = sum(after[k] - before.get(k, 0.0) for k in after if k.startswith(name))
        return counted == 100 and after["tokenwire_tokenizer_active_requests"] == 0

    await until(all_counted, 3.0)


async def _has_no_active_requests(stack: Stack) -> bool:
    return (await stack.metrics(stack.tokenizer))["tokenwire_tokenizer_active_requests"] == 0


async def _ending(client: AsyncClient, kind: int) -> None:
    if kind % 4 == 0:
        await client.generate(FOREVER, forever(5)).result()
    elif kind % 4 == 1:
        async for _ in client.generate(FOREVER, forever(500)):
            break
    elif kind % 4 == 2:
        await client.generate(FOREVER, Sampling(top_p=0.0)).result()
    else:
        # Long enough to reach the service from a crowd, far too short for so many tokens.
        await client.generate(FOREVER, forever(8000), timeout=2.0).result()
