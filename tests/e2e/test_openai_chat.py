"""The official `openai` SDK, unmodified: models, chat, tools, structured output, responses."""

import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pydantic
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from tests.fixtures.openai_sdk import FRANCE, MODEL, PARIS, sdk_client, sdk_stack
from tests.fixtures.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="module")
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with sdk_stack(tmp_path_factory.mktemp("logs")) as stack:
        yield stack


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[AsyncOpenAI]:
    async with sdk_client(stack) as client:
        yield client


async def test_models(client: AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    assert [model.id for model in models] == [MODEL]
    assert (await client.models.retrieve(MODEL)).owned_by == "tokenwire"
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("gpt-4")


async def test_chat(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", PARIS, "stop")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    asked_again = [*FRANCE, choice.message, *FRANCE]
    again = await client.chat.completions.create(model=MODEL, messages=asked_again, max_tokens=3, temperature=0)
    assert again.choices[0].finish_reason == "length"


async def test_streamed_chat_with_usage(client: AsyncOpenAI) -> None:
    plain = await client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0)
    stream = await client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == PARIS
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert plain.usage is not None
    assert chunks[-1].usage.completion_tokens == plain.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens == plain.usage.prompt_tokens


async def test_the_stream_helper(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(model=MODEL, messages=FRANCE, temperature=0) as stream:
        kinds = {event.type async for event in stream}
        final = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert final.choices[0].message.content == PARIS


async def test_content_parts_and_developer_role(client: AsyncOpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": FRANCE[0]["content"]}]}]
    answer = await client.chat.completions.create(model=MODEL, messages=parts, temperature=0)
    assert answer.choices[0].message.content == PARIS
    told: Any = [{"role": "developer", "content": "Answer with one word."}, *FRANCE]
    system: Any = [{"role": "system", "content": "Answer with one word."}, *FRANCE]
    texts = {
        (await client.chat.completions.create(model=MODEL, messages=m, temperature=0, max_tokens=9))
        .choices[0]
        .message.content
        for m in (told, system)
    }
    assert len(texts) == 1


async def test_stop(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model=MODEL, messages=FRANCE, temperature=0, stop=[" France"])
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("The capital of", "stop")
    kept = await client.chat.completions.create(
        model=MODEL, messages=FRANCE, temperature=0, stop=" France", extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].message.content == "The capital of France"


async def test_samples_equal_single_requests(client: AsyncOpenAI) -> None:
    fields: Any = {"model": MODEL, "messages": FRANCE, "max_tokens": 12, "temperature": 1.0}
    three = await client.chat.completions.create(**fields, n=3, seed=40)
    single = [await client.chat.completions.create(**fields, seed=40 + number) for number in range(3)]
    assert [choice.message.content for choice in three.choices] == [one.choices[0].message.content for one in single]
    assert three.usage is not None
    assert three.usage.completion_tokens == sum(one.usage.completion_tokens for one in single if one.usage)
    assert single[0].usage is not None
    assert three.usage.prompt_tokens == single[0].usage.prompt_tokens


async def test_streamed_samples(client: AsyncOpenAI) -> None:
    """B127."""
    fields: Any = {"model": MODEL, "messages": FRANCE, "max_tokens": 12, "temperature": 1.0, "n": 3, "seed": 40}
    plain = await client.chat.completions.create(**fields)
    texts, ends = {0: "", 1: "", 2: ""}, list[int]()
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends += [choice.index] if choice.finish_reason else []
    assert texts == {choice.index: choice.message.content for choice in plain.choices}
    assert sorted(ends) == [0, 1, 2]


async def test_chat_logprobs(client: AsyncOpenAI) -> None:
    """B135: those of a stream put together are those of the answer."""
    fields: Any = {"model": MODEL, "messages": FRANCE, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    plain = await client.chat.completions.create(**fields)
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert plain.usage is not None
    assert len(logprobs.content) == plain.usage.completion_tokens
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode().startswith(PARIS)
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert entry.logprob <= 0
    streamed = []
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            streamed += (choice.logprobs.content or []) if choice.logprobs else []
    assert [entry.token for entry in streamed] == [entry.token for entry in logprobs.content]
    assert [entry.logprob for entry in streamed] == pytest.approx(
        [entry.logprob for entry in logprobs.content], abs=1e-4
    )


async def test_a_required_tool_is_called(client: AsyncOpenAI) -> None:
    ask: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
    fields: Any = {"model": MODEL, "messages": ask, "tools": [WEATHER], "temperature": 0, "max_tokens": 64}
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = (await client.chat.completions.create(**fields, tool_choice=choice)).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")
        again: list[Any] = [*ask, answer.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
        follow = await client.chat.completions.create(model=MODEL, messages=again, max_tokens=8, tools=[WEATHER])
        assert follow.choices[0].finish_reason in ("length", "stop", "tool_calls")
    async with client.chat.completions.stream(**fields, tool_choice="required") as stream:
        async for _ in stream:
            pass
        final = (await stream.get_final_completion()).choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls
    assert final.message.tool_calls[0].function.name == "get_weather"


async def test_structured_output(client: AsyncOpenAI) -> None:
    class City(pydantic.BaseModel):
        name: str
        people: int

    answer = await client.chat.completions.parse(
        model=MODEL, messages=FRANCE, response_format=City, temperature=1, max_tokens=200, seed=3
    )
    assert isinstance(answer.choices[0].message.parsed, City)
    choice = await client.chat.completions.create(
        model=MODEL, messages=FRANCE, extra_body={"structured_outputs": {"choice": ["Rome", "Paris"]}}
    )
    assert choice.choices[0].message.content in ("Rome", "Paris")


async def test_response(client: AsyncOpenAI) -> None:
    answer = await client.responses.create(model=MODEL, input=FRANCE[0]["content"], temperature=0)
    assert (answer.output_text, answer.status) == (PARIS, "completed")
    cut = await client.responses.create(model=MODEL, input="Count to ten.", max_output_tokens=3)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.usage is not None
    assert cut.usage.output_tokens == 3


async def test_streamed_response(client: AsyncOpenAI) -> None:
    kinds, text = [], ""
    async for event in await client.responses.create(
        model=MODEL, input=FRANCE[0]["content"], temperature=0, stream=True
    ):
        kinds.append(event.type)
        text += event.delta if event.type == "response.output_text.delta" else ""
    assert (kinds[0], kinds[-1], text) == ("response.created", "response.completed", PARIS)
    async with client.responses.stream(model=MODEL, input=FRANCE, temperature=0) as stream:
        final = await stream.get_final_response()
    assert final.output_text == PARIS


async def test_raw_headers_carry_the_request_id(client: AsyncOpenAI) -> None:
    raw = await client.chat.completions.with_raw_response.create(
        model=MODEL, messages=FRANCE, max_tokens=1, extra_headers={"X-Request-Id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine"
    parsed: Any = raw.parse()
    assert parsed.id == "chatcmpl-mine"
