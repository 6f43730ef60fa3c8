"""The official `openai` SDK, unmodified: completions."""

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.fixtures.openai_sdk import MODEL, sdk_client, sdk_stack
from tests.fixtures.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with sdk_stack(tmp_path_factory.mktemp("logs")) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with sdk_client(stack) as client:
        yield client


async def test_completion(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=4
    )
    assert "Paris" in answer.choices[0].text
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 4)


async def test_completion_of_ids_is_that_of_their_text(client: AsyncOpenAI) -> None:
    by_text = await client.completions.create(model=MODEL, prompt="Hello", temperature=0, max_tokens=6)
    by_ids = await client.completions.create(model=MODEL, prompt=[19556], temperature=0, max_tokens=6)
    assert by_text.choices[0].text == by_ids.choices[0].text


async def test_streamed_completion(client: AsyncOpenAI) -> None:
    fields: Any = {"model": MODEL, "prompt": "Hello", "temperature": 0, "max_tokens": 20}
    plain = await client.completions.create(**fields)
    stream = await client.completions.create(**fields, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == plain.choices[0].text


async def test_several_prompts(client: AsyncOpenAI) -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    together = await client.completions.create(model=MODEL, prompt=prompts, temperature=0, max_tokens=5)
    assert [choice.index for choice in together.choices] == [0, 1]
    for prompt, choice in zip(prompts, together.choices, strict=True):
        alone = await client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=5)
        assert alone.choices[0].text == choice.text


async def test_seed(client: AsyncOpenAI) -> None:
    texts = [
        (await client.completions.create(model=MODEL, prompt="Once", max_tokens=12, temperature=1, seed=seed))
        .choices[0]
        .text
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


async def test_completion_logprobs_and_echo(client: AsyncOpenAI) -> None:
    """B131: one entry for each prompt token and each new one."""
    prompt = "The capital of France is"
    answer = await client.completions.create(
        model=MODEL, prompt=prompt, temperature=0, max_tokens=1, logprobs=1, echo=True
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert answer.usage is not None
    assert found.tokens is not None
    assert len(found.tokens) == answer.usage.prompt_tokens + 1
    assert found.token_logprobs is not None
    assert found.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in found.token_logprobs[1:])
    assert "".join(found.tokens) == answer.choices[0].text
    assert answer.choices[0].text.startswith(prompt)


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 5])
@pytest.mark.parametrize("max_tokens", [0, 1, 8])
async def test_echo_logprobs_stream_and_length_together(
    client: AsyncOpenAI, echo: bool, stream: bool, logprobs: int | None, max_tokens: int
) -> None:
    """B028, B130: all combinations work but max_tokens 0, which is always a 400."""
    fields: Any = {"model": MODEL, "prompt": "Hello there", "temperature": 0, "echo": echo, "logprobs": logprobs}
    fields |= {"max_tokens": max_tokens}
    if max_tokens == 0:
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            await client.completions.create(**fields, stream=stream)
        return
    plain = (await client.completions.create(**fields)).choices[0]
    assert plain.text.startswith("Hello there") == echo
    if stream:
        parts = [chunk.choices[0] async for chunk in await client.completions.create(**fields, stream=True)]
        assert "".join(part.text for part in parts) == plain.text
        tokens = [token for part in parts if part.logprobs for token in part.logprobs.tokens or ()]
        assert tokens == (plain.logprobs.tokens if plain.logprobs else [])


async def test_logit_bias(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model=MODEL, prompt="The capital of France is", temperature=0, max_tokens=3, logit_bias={"13874": 100}
    )
    assert answer.choices[0].text == " pepper" * 3
