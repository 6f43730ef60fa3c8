"""The asyncio client over real sockets: what streams give, how they end, who hears of it."""

import asyncio
import gc
import math
import socket
import time
from typing import Any

import grpc
import pytest

from tests.fixtures.fake_tokenizer_service import (
    End,
    FakeTokenizerService,
    Hold,
    Refuse,
    Say,
    SeenCall,
    completion,
    echo_script,
    echo_text,
    serving,
)
from tokenwire_client.client import AsyncClient
from tokenwire_client.errors import (
    Cancelled,
    DeadlineExceeded,
    IncompleteStream,
    InvalidRequest,
    TokenwireError,
    Unavailable,
)
from tokenwire_client.retry import NO_RETRIES, RetryPolicy
from tokenwire_client.types import Delta, FinishReason, HealthStatus, Message, Model, Sampling, Usage

HELD = [Say("a", (1,)), Hold("never"), End(completion())]
SOON = RetryPolicy(attempts=4, first_backoff=0.01, max_backoff=0.02)
GONE = Refuse(grpc.StatusCode.UNAVAILABLE, "no engine")


def holding(*prompts: str) -> FakeTokenizerService:
    return FakeTokenizerService({prompt: [HELD] for prompt in prompts})


async def was_cancelled(call: SeenCall) -> bool:
    """Within a second."""
    return await asyncio.to_thread(call.cancelled.wait, 1.0)


async def test_the_whole_surface() -> None:
    last = completion(request_id="r", stop_string="\n", seed=9)
    script = [Say("Par", (1, 2)), Say("is", (3,)), End(last, "!", (4,))]
    service = FakeTokenizerService({"hi": [script], "1,2": [script]})
    async with serving(service) as target, AsyncClient(target) as client:
        for stream in (client.generate("hi"), client.generate([1, 2]), client.chat([Message("user", "hi")])):
            assert stream.completion is None
            assert [d async for d in stream] == [Delta("Par", (1, 2)), Delta("is", (3,)), Delta("!", (4,))]
            done = await stream.result()
            assert done is stream.completion
            assert (done.text, done.token_ids) == ("Paris!", (1, 2, 3, 4))
            assert done.finish_reason is FinishReason.STOP
            assert (done.usage, done.stop_string, done.stop_token_id) == (Usage(3, 2, 1), "\n", None)
            assert (done.seed, done.request_id) == (9, "r")
            assert [d async for d in stream] == []
        assert await client.tokenize("aé") == (97, 195, 169)
        turns = [Message("user", "x"), Message("assistant", "y")]
        assert bytes(await client.tokenize(turns)) == b"user:x;assistant:y;"
        assert await client.detokenize([97, 195, 169]) == "aé"
        assert await client.models() == (Model("tiny", 256, 64, (0, 2), "ab12", 2),)
        assert (await client.health()).serving
        assert (await client.health("draining")).status is HealthStatus.NOT_SERVING


async def test_everything_given_arrives() -> None:
    service = FakeTokenizerService()
    sampling = Sampling(max_tokens=5, temperature=0.0, stop=["x", "y"], stop_token_ids=[7], skip_special_tokens=False)
    async with serving(service) as target, AsyncClient(target) as client:
        await client.generate(
            "p", sampling, model="m", add_special_tokens=False, cache_salt="", request_id="r"
        ).result()
        await client.chat(
            [Message("user", "c")],
            sampling,
            model="m",
            add_generation_prompt=False,
            cache_salt="s",
            request_id="r",
        ).result()
    [generated], [chatted] = service.calls("p"), service.calls("c")
    for request in (generated.request, chatted.request):
        assert (request.model, request.request_id) == ("m", "r")
        assert request.options.sampling.temperature == 0.0
        assert request.options.sampling.HasField("temperature")
        assert list(request.options.stop) == ["x", "y"]
        assert list(request.options.sampling.stop_token_ids) == [7]
        assert request.options.skip_special_tokens is False
        assert request.options.HasField("cache_salt")
    assert generated.request.HasField("add_special_tokens")
    assert chatted.request.HasField("add_generation_prompt")
    assert chatted.request.options.cache_salt == "s"


async def test_a_hundred_parallel_streams_see_their_own_tokens_b149() -> None:
    """B149: every stream gets its own tokens in order, also when every fourth of them is left early."""
    prompts = [f"stream {number}" for number in range(100)]
    scripts = {prompt: [echo_script(prompt, 20)] for prompt in prompts}

    async def read(client: AsyncClient, number: int) -> str:
        texts = []
        async for delta in client.generate(prompts[number]):
            texts.append(delta.text)
            if number % 4 == 0 and len(texts) == 3:
                break
        return "".join(texts)

    async with serving(FakeTokenizerService(scripts)) as target, AsyncClient(target) as client:
        read_texts = await asyncio.gather(*(read(client, number) for number in range(100)))
    assert read_texts == [echo_text(p, 3 if n % 4 == 0 else 20) for n, p in enumerate(prompts)]


async def test_two_batches_keep_their_order_b147() -> None:
    """B147: results are in the order of the inputs, in the second batch through the same client too."""
    async with serving(FakeTokenizerService()) as target, AsyncClient(target) as client:
        for batch in (range(40), range(25, 90)):
            prompts = [f"{'long ' * (number % 7)}{number}" for number in batch]
            results = await asyncio.gather(*(client.generate(prompt).result() for prompt in prompts))
            assert [result.text for result in results] == [echo_text(prompt) for prompt in prompts]


@pytest.mark.parametrize("limit", [100, 2**31 - 1])
async def test_six_hundred_concurrent_streams_b122(limit: int) -> None:
    """B122: all 600 get their first token before any may end, though the server takes 100 per connection."""
    prompts = [f"p{number}" for number in range(600)]
    script = [Say("first", (1,)), Hold("all have begun"), Say(" last", (2,)), End(completion())]
    service = FakeTokenizerService({prompt: [script] for prompt in prompts})
    begun = 0
    slowest = 0.0

    async def read(client: AsyncClient, prompt: str) -> str:
        nonlocal begun, slowest
        sent = time.perf_counter()
        async with client.generate(prompt) as stream:
            async for _ in stream:
                if begun < 600:
                    begun += 1
                    slowest = max(slowest, time.perf_counter() - sent)
                if begun == 600:
                    service.open_gate("all have begun")
        return (await stream.result()).text

    options = [("grpc.max_concurrent_streams", limit)]
    async with serving(service, options) as target, AsyncClient(target) as client, asyncio.timeout(60):
        texts = await asyncio.gather(*(read(client, prompt) for prompt in prompts))
    assert texts == ["first last"] * 600
    assert slowest < 20.0


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


async def test_the_rest_of_a_stream_can_be_collected() -> None:
    async with serving(FakeTokenizerService()) as target, AsyncClient(target) as client:
        stream = client.generate("p")
        deltas = aiter(stream)
        assert (await anext(deltas)).text == "<p:0>"
        assert (await stream.result()).text == echo_text("p")


@pytest.mark.parametrize("said", [0, 1, 3])
async def test_an_incomplete_stream_is_an_error(said: int) -> None:
    service = FakeTokenizerService({"p": [[Say("x", (1,))] * said]})
    async with serving(service) as target, AsyncClient(target) as client:
        stream = client.generate("p")
        with pytest.raises(IncompleteStream, match=f"after {said} tokens"):
            await stream.result()
        assert stream.completion is None
        # It came to an end, so asking again would hide that something is wrong.
        assert len(service.calls("p")) == 1


@pytest.mark.parametrize(
    ("default", "given", "seen"),
    [(None, None, None), (30.0, None, 30.0), (30.0, 5.0, 5.0), (None, 5.0, 5.0), (30.0, math.inf, None)],
)
async def test_the_deadline_that_the_service_sees(
    default: float | None, given: float | None, seen: float | None
) -> None:
    service = FakeTokenizerService()
    async with serving(service) as target, AsyncClient(target, timeout=default) as client:
        await client.generate("p", timeout=given).result()
        await client.tokenize("t", timeout=given)
    for name in ("p", "Tokenize"):
        [call] = service.calls(name)
        if seen is None:
            assert call.remaining_s is None
        else:
            assert call.remaining_s is not None
            assert call.remaining_s == pytest.approx(seen, abs=2.0)


async def test_a_wrong_value_is_refused_before_anything_is_sent() -> None:
    service = FakeTokenizerService()
    async with serving(service) as target, AsyncClient(target) as client:
        with pytest.raises(InvalidRequest, match=r"options\.sampling\.seed"):
            client.generate("p", Sampling(seed=2**64))
        with pytest.raises(InvalidRequest, match="timeout"):
            client.generate("p", timeout=-1.0)
        with pytest.raises(InvalidRequest, match="text: "):
            await client.tokenize("\ud800")
    assert service.calls("p") == service.calls("Tokenize") == []


@pytest.mark.parametrize("failures", [1, 3])
async def test_unavailable_is_tried_again_before_the_first_message(failures: int) -> None:
    """All attempts share one deadline: the clock here runs seven seconds with each failure."""
    now = 0.0

    def jitter() -> float:
        nonlocal now
        now += 7.0
        return 0.5

    retry = RetryPolicy(attempts=4, first_backoff=0.01, max_backoff=0.02, jitter=jitter)
    service = FakeTokenizerService({"p": [*[[GONE]] * failures, echo_script("p")]}, {"Tokenize": [GONE] * failures})
    async with (
        serving(service) as target,
        AsyncClient(target, retry=retry, timeout=30.0, clock=lambda: now) as client,
    ):
        assert (await client.generate("p").result()).text == echo_text("p")
        assert await client.tokenize("a") == (97,)
    for name in ("p", "Tokenize"):
        seen = [call.remaining_s for call in service.calls(name)]
        assert seen == pytest.approx([30.0 - 7.0 * n for n in range(failures + 1)], abs=2.0)


@pytest.mark.parametrize(
    ("script", "retry", "calls"),
    [
        ([GONE], SOON, 4),
        ([GONE], NO_RETRIES, 1),
        ([Say("x"), GONE], SOON, 1),
        ([Refuse(grpc.StatusCode.UNAVAILABLE, "later", (), 60.0)], SOON, 1),
        ([Refuse(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (), 0.01)], SOON, 1),
    ],
)
async def test_when_it_is_not_tried_again(script: list[Any], retry: RetryPolicy, calls: int) -> None:
    service = FakeTokenizerService({"p": [script]})
    async with serving(service) as target, AsyncClient(target, retry=retry) as client:
        with pytest.raises(TokenwireError):
            await client.generate("p").result()
        assert len(service.calls("p")) == calls
        assert sum(client._pool.calls()) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def test_a_service_that_is_down_is_unavailable() -> None:
    async with AsyncClient(f"127.0.0.1:{free_port()}", retry=SOON, timeout=20.0) as client:
        with pytest.raises(Unavailable):
            await client.generate("p").result()
        with pytest.raises(Unavailable):
            await client.health()


async def test_a_service_that_starts_meanwhile_is_found() -> None:
    port = free_port()
    failed = asyncio.Event()

    def jitter() -> float:
        failed.set()
        return 0.5

    retry = RetryPolicy(attempts=50, first_backoff=0.1, max_backoff=0.2, jitter=jitter)
    async with AsyncClient(f"127.0.0.1:{port}", retry=retry, timeout=30.0) as client:
        answer = asyncio.create_task(client.generate("p").result())
        await failed.wait()
        async with serving(FakeTokenizerService(), address=f"127.0.0.1:{port}"):
            assert (await answer).text == echo_text("p")


async def test_replicas_behind_one_name_share_the_work_b115() -> None:
    """B115: two addresses get 30-70 % each; when one stops, the other serves all."""
    services = [FakeTokenizerService(), FakeTokenizerService()]
    async with serving(services[0]) as first:
        async with serving(services[1]) as second:
            client = AsyncClient(f"ipv4:{first},{second}", retry=SOON)
            while not all(service.calls("warm") for service in services):
                await client.generate("warm").result()
            for number in range(100):
                await client.generate(f"p{number}").result()
            shares = [sum(bool(s.calls(f"p{n}")) for n in range(100)) for s in services]
            assert sum(shares) == 100
            assert 30 <= shares[0] <= 70
        for number in range(20):
            await client.generate(f"q{number}").result()
        assert all(services[0].calls(f"q{number}") for number in range(20))
        await client.close()


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
