"""A client of several services: what one cannot serve goes to another, before the first byte and never after it."""

import asyncio

import grpc
import pytest

from tests.fixtures.fake_tokenizer_service import (
    FakeTokenizerService,
    Refuse,
    Say,
    echo_text,
    serving,
    serving_in_thread,
)
from tokenwire_client import AsyncClient, Client, RetryPolicy, Unavailable

SOON = RetryPolicy(first_backoff=0.001)
DRAINING = Refuse(grpc.StatusCode.UNAVAILABLE, "the service is shutting down", (), 30.0)
NUM_PROMPTS = 8
PROMPTS = [f"p{number}" for number in range(NUM_PROMPTS)]
DEAD = "127.0.0.1:1"


def refusing() -> FakeTokenizerService:
    return FakeTokenizerService({prompt: [[DRAINING]] for prompt in PROMPTS}, {"Tokenize": [DRAINING] * 4})


async def test_a_draining_service_is_left_and_not_waited_for() -> None:
    """Although it asks for half a minute; and calls that follow avoid it."""
    draining, other = refusing(), FakeTokenizerService()
    async with serving(draining) as first, serving(other) as second:
        async with AsyncClient([first, second], retry=SOON, timeout=10) as client:
            for prompt in PROMPTS:
                assert (await client.generate(prompt).result()).text == echo_text(prompt)
            assert len(await client.tokenize("ab")) == 2
        assert sum(len(draining.calls(prompt)) for prompt in PROMPTS) == 1
        assert all(len(other.calls(prompt)) == 1 for prompt in PROMPTS)


async def test_many_calls_at_once_survive_a_dead_and_a_draining_service() -> None:
    other = FakeTokenizerService()
    async with serving(refusing()) as first, serving(other) as second:
        async with AsyncClient(f"{DEAD},{first},{second}", retry=SOON, timeout=10) as client:
            answers = await asyncio.gather(*(client.generate(prompt).result() for prompt in PROMPTS * 4))
        assert [answer.text for answer in answers] == [echo_text(prompt) for prompt in PROMPTS * 4]


def test_the_blocking_client_does_the_same() -> None:
    other = FakeTokenizerService()
    with serving_in_thread(refusing()) as first, serving_in_thread(other) as second:
        with Client([DEAD, first, second], retry=SOON, timeout=10) as client:
            for prompt in PROMPTS:
                assert client.generate(prompt).result().text == echo_text(prompt)
            assert len(client.tokenize("ab")) == 2
        assert all(len(other.calls(prompt)) == 1 for prompt in PROMPTS)


async def test_a_stream_that_has_begun_is_not_begun_again_elsewhere() -> None:
    broken = [[Say("half", (1,)), Refuse(grpc.StatusCode.UNAVAILABLE, "gone")]]
    services = [FakeTokenizerService({"p": broken}) for _ in range(2)]
    async with (
        serving(services[0]) as first,
        serving(services[1]) as second,
        AsyncClient([first, second], retry=SOON) as client,
    ):
        with pytest.raises(Unavailable, match="gone"):
            await client.generate("p").result()
    assert sum(len(service.calls("p")) for service in services) == 1
