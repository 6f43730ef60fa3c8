"""The official `openai` SDK, unmodified: errors as typed exceptions, timeouts, cancellation."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.fixtures.openai_sdk import FRANCE, MODEL, PARIS, sdk_client, sdk_stack
from tests.fixtures.stack import Stack, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 4000, "extra_body": {"ignore_eos": True}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with sdk_stack(tmp_path_factory.mktemp("logs")) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with sdk_client(stack) as client:
        yield client


@pytest.mark.parametrize(
    ("fields", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"model": "gpt-4"}, openai.NotFoundError, "model"),
        ({"messages": []}, openai.BadRequestError, "messages"),
        ({"extra_body": {"tempratur": 1}}, openai.BadRequestError, "tempratur"),
        ({"max_tokens": 2**63}, openai.BadRequestError, "max_tokens"),
    ],
)
async def test_typed_errors(
    client: AsyncOpenAI, fields: dict[str, Any], error: type[openai.APIStatusError], param: str
) -> None:
    for stream in (False, True):
        with pytest.raises(error) as caught:
            await client.chat.completions.create(**({"model": MODEL, "messages": FRANCE} | fields), stream=stream)
        assert caught.value.param == param
        assert caught.value.request_id


async def test_a_wrong_key(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()


async def test_a_prompt_that_is_too_long(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_model_len 8,192"):
        await client.completions.create(model=MODEL, prompt=[5] * 8192)


async def test_a_client_that_times_out_frees_the_engine(client: AsyncOpenAI, stack: Stack) -> None:
    with pytest.raises(openai.APITimeoutError):
        await client.completions.create(model=MODEL, timeout=0.5, **LONG)
    await stack.until_idle(2.0)


async def test_a_deadline_of_the_request(client: AsyncOpenAI, stack: Stack) -> None:
    with pytest.raises(openai.InternalServerError) as caught:
        await client.completions.create(model=MODEL, extra_headers={"X-Request-Timeout": "0.5"}, **LONG)
    assert caught.value.status_code == 504
    await stack.until_idle(2.0)


@pytest.mark.parametrize("more", [{}, {"n": 4}])
async def test_leaving_in_mid_stream_frees_the_blocks(client: AsyncOpenAI, stack: Stack, more: dict[str, Any]) -> None:
    """B037 with n."""
    stream = await client.completions.create(model=MODEL, stream=True, **LONG, **more)
    async for _ in stream:
        break
    await stream.close()
    load = await stack.until_idle(2.0)
    assert load.used_blocks == 0


async def test_cancelling_a_waiting_call_frees_the_blocks(client: AsyncOpenAI, stack: Stack) -> None:
    task = asyncio.create_task(client.completions.create(model=MODEL, **LONG))

    async def runs() -> bool:
        return (await stack.load()).running_requests == 1

    await until(runs, 10)
    task.cancel()
    await stack.until_idle(2.0)


async def test_twenty_at_once(client: AsyncOpenAI) -> None:
    calls = [client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0) for _ in range(20)]
    answers = await asyncio.gather(*calls)
    assert {answer.choices[0].message.content for answer in answers} == {PARIS}


async def test_nothing_was_logged_as_an_error(stack: Stack) -> None:
    assert stack.errors_logged() == []
