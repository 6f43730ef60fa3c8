"""The asyncio client over real sockets: what is sent, what streams give, how they end."""

import asyncio
import math
import time

import pytest

from tests.fixtures.fake_tokenizer_service import (
    End,
    FakeTokenizerService,
    Hold,
    Say,
    completion,
    echo_script,
    echo_text,
    serving,
)
from tokenwire_client.client import AsyncClient
from tokenwire_client.errors import (
    IncompleteStream,
    InvalidRequest,
)
from tokenwire_client.types import Delta, FinishReason, HealthStatus, Message, Model, Sampling, Usage


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
