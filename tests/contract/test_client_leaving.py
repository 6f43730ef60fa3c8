"""Streams of the asyncio client that are left, in every way there is: the service hears of it."""

import asyncio
import gc
from typing import Any

import pytest

from tests.fixtures.fake_tokenizer_service import (
    End,
    FakeTokenizerService,
    Hold,
    Say,
    SeenCall,
    completion,
    serving,
)
from tokenwire_client.client import AsyncClient
from tokenwire_client.errors import (
    Cancelled,
    DeadlineExceeded,
)

HELD = [Say("a", (1,)), Hold("never"), End(completion())]


def holding(*prompts: str) -> FakeTokenizerService:
    return FakeTokenizerService({prompt: [HELD] for prompt in prompts})


async def was_cancelled(call: SeenCall) -> bool:
    """Within a second."""
    return await asyncio.to_thread(call.cancelled.wait, 1.0)


class Trouble(Exception):
    """Raised by the caller in the middle of a stream."""


async def leave_by_break(client: AsyncClient) -> None:
    async for _ in client.generate("held"):
        break


async def leave_by_break_and_keep_the_stream(client: AsyncClient) -> None:
    stream = client.generate("held")
    async for _ in stream:
        break
    with pytest.raises(Cancelled, match="left before its end"):
        await stream.result()
    assert stream.completion is None


async def leave_by_exception(client: AsyncClient) -> None:
    async def read() -> None:
        async for _ in client.generate("held"):
            raise Trouble

    with pytest.raises(Trouble):
        await read()


async def leave_by_async_with(client: AsyncClient) -> None:
    async with client.generate("held") as stream:
        await anext(aiter(stream))


async def leave_by_aclose(client: AsyncClient) -> None:
    stream = client.generate("held")
    deltas = aiter(stream)
    await anext(deltas)
    await stream.aclose()
    await stream.aclose()
    with pytest.raises(Cancelled):
        await anext(deltas)


async def leave_by_collection(client: AsyncClient) -> None:
    stream = client.generate("held")
    deltas = aiter(stream)
    await anext(deltas)
    del stream, deltas
    gc.collect()


async def leave_by_collection_in_a_cycle(client: AsyncClient) -> None:
    holder: list[Any] = [client.generate("held")]
    holder.append(holder)
    await anext(aiter(holder[0]))
    del holder
    await asyncio.to_thread(gc.collect)


async def leave_by_task_cancel(client: AsyncClient) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in client.generate("held"):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_asyncio_timeout(client: AsyncClient) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await client.generate("held").result()


async def leave_by_deadline(client: AsyncClient) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.generate("held", timeout=0.2).result()


async def leave_by_closing_the_client(client: AsyncClient) -> None:
    stream = client.generate("held")
    deltas = aiter(stream)
    await anext(deltas)
    await client.close()
    with pytest.raises(Cancelled):
        await anext(deltas)
    with pytest.raises(Cancelled, match="client is closed"):
        client.generate("held")


WAYS_OUT = [
    leave_by_break,
    leave_by_break_and_keep_the_stream,
    leave_by_exception,
    leave_by_async_with,
    leave_by_aclose,
    leave_by_collection,
    leave_by_collection_in_a_cycle,
    leave_by_task_cancel,
    leave_by_asyncio_timeout,
    leave_by_deadline,
    leave_by_closing_the_client,
]


@pytest.mark.parametrize("leave", WAYS_OUT, ids=lambda way: way.__name__)
async def test_leaving_a_stream_cancels_it_in_the_service(leave: Any) -> None:
    service = holding("held")
    async with serving(service) as target, AsyncClient(target) as client:
        await leave(client)
        [call] = service.calls("held")
        assert await was_cancelled(call)
        assert sum(client._pool.calls()) == 0


async def test_closing_from_another_task_ends_the_reader() -> None:
    service = holding("held")
    async with serving(service) as target, AsyncClient(target) as client:
        stream = client.generate("held")
        reader = asyncio.create_task(stream.result())
        [call] = await asyncio.to_thread(service.wait_for_calls, "held")
        await stream.aclose()
        with pytest.raises(Cancelled):
            await reader
        assert not reader.cancelled()
        assert await was_cancelled(call)


async def test_a_stream_that_nobody_reads_is_cancelled_when_forgotten() -> None:
    service = holding("held")
    async with serving(service) as target, AsyncClient(target) as client:
        stream = client.generate("held")
        [call] = await asyncio.to_thread(service.wait_for_calls, "held")
        del stream
        assert await was_cancelled(call)


async def test_a_finished_stream_is_not_cancelled() -> None:
    service = FakeTokenizerService()
    async with serving(service) as target, AsyncClient(target) as client:
        async with client.generate("p") as stream:
            await stream.result()
        assert sum(client._pool.calls()) == 0
    assert not service.calls("p")[0].cancelled.is_set()


async def test_a_thousand_cancelled_streams_leave_nothing_behind_b123(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B123: no log line, no place on a connection is left of a cancelled stream."""
    service = holding("held")
    async with serving(service) as target, AsyncClient(target) as client:
        for _ in range(10):
            streams = [client.generate("held") for _ in range(100)]
            for stream in streams:
                await anext(aiter(stream))
                await stream.aclose()
        assert sum(client._pool.calls()) == 0
        calls = service.calls("held")
        assert len(calls) == 1000
        assert all([await was_cancelled(call) for call in calls])
    assert [record for record in caplog.records if record.levelname in {"WARNING", "ERROR"}] == []
