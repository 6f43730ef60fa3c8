"""Tool calls of the tokenizer service over real sockets, beside a FAKE-ENGINE."""

import asyncio
import json
from typing import Any

import grpc
import pytest
from openai import AsyncOpenAI

from tests.fixtures import fake_engine as fe
from tests.fixtures.http_calls import CHAT, RESPONSES, body_of, events, http
from tests.fixtures.tokenizer_app import default_model, failure, running
from tests.fixtures.tokenizers_made import SPECIAL_NAMES, msp_tokenizer, write_folder
from tokenizer_service.sessions.prompt_text import PromptEncoder
from tokenizer_service.sessions.request import TextPrompt
from tokenizer_service.text.prompt import ChatLimits
from tokenizer_service.text.tool_formats import ToolFormat
from tokenwire.common.v1 import outcome_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

TEXT = 'Sure.\n<tool_call>\n{"name": "f", "arguments": {"a": [1, "é"]}}\n</tool_call>'
ARRAY = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
SCHEMA = '{"type": "object", "properties": {"a": {}}}'


def ids_of(text: str) -> list[int]:
    return default_model().encoder.encode(TextPrompt(text, False), None)


def request(**fields: Any) -> pb.ChatRequest:
    tools = [pb.Tool(name="f", parameters=SCHEMA), pb.Tool(name="g")]
    return pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hi")], tools=tools, **fields)


async def play_text(call: fe.FakeRequest) -> None:
    """An array of calls where one is forced, text with a call in it where not."""
    is_forced = call.message.sampling.HasField("structured_output")
    await call.play(ids_of(ARRAY if is_forced else TEXT), eos=2)


async def read(call: Any) -> tuple[str, list[list[str]], pb.Completion]:
    text, calls, end = "", list[list[str]](), pb.Completion()
    async for message in call:
        text += message.text
        for delta in message.tool_calls:
            if delta.HasField("id"):
                assert delta.index == len(calls)
                calls.append([delta.id, delta.name, ""])
            calls[delta.index][2] += delta.arguments
        if message.HasField("completion"):
            end = message.completion
    return text, calls, end


async def test_calls_are_taken_out_of_the_text() -> None:
    async with running(default_model(), play_text) as service:
        text, calls, end = await read(service.stub.Chat(request()))
        assert (text, [call[1:] for call in calls]) == ("Sure.", [["f", '{"a": [1, "é"]}']])
        assert calls[0][0].startswith("call_")
        assert end.has_tool_calls
        assert not service.engine.requests[0].message.sampling.HasField("structured_output")
        none = request(tool_choice=pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE))
        assert (await read(service.stub.Chat(none)))[:2] == (TEXT, [])
        plain = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hi")])
        assert (await read(service.stub.Chat(plain)))[:2] == (TEXT, [])
        prompts = [each.prompt for each in service.engine.requests]
        assert prompts[1] == prompts[2]
        assert len(prompts[0]) > len(prompts[1])


async def test_a_forced_call_is_constrained_by_the_engine() -> None:
    async with running(default_model(), play_text) as service:
        required = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)
        text, calls, end = await read(service.stub.Chat(request(tool_choice=required)))
        assert (text, [call[1:] for call in calls]) == ("", [["f", '{"a": 1}'], ["g", "{}"]])
        assert calls[0][0] != calls[1][0]
        assert end.has_tool_calls
        assert end.finish_reason == fe.STOP
        schema = json.loads(service.engine.requests[0].message.sampling.structured_output.json_schema)
        assert schema["$defs"]["tool0"] == json.loads(SCHEMA)
        options = pb.GenerationOptions()
        options.sampling.structured_output.regex = "a"
        error = await failure(service.stub.Chat(request(tool_choice=required, options=options)))
        assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert "tool_choice.mode" in (error.details() or "")


async def test_the_engine_s_refusal_of_a_schema_names_the_tools() -> None:
    async def script(call: fe.FakeRequest) -> None:
        error = outcome_pb2.RequestError(grpc_code=3, message="bad")
        error.field_violations.add(field="request.sampling.structured_output.json_schema", description="no use")
        await call.send([], call.finish(fe.ERROR, error=error))

    async with running(default_model(), script) as service:
        named = pb.ToolChoice(name="g")
        error = await failure(service.stub.Chat(request(tool_choice=named)))
        assert (error.code(), error.details()) == (grpc.StatusCode.INVALID_ARGUMENT, "tools: no use")


def http_client(url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0)


@pytest.mark.parametrize("stream", [True, False])
async def test_several_samples_over_http(stream: bool) -> None:
    async def script(call: fe.FakeRequest) -> None:
        for index in range(2):
            await call.send(ids_of(TEXT if index else "No."), index=index)
            await call.send([], call.finish(fe.STOP), index=index)

    tools: Any = [{"type": "function", "function": {"name": "f", "parameters": json.loads(SCHEMA)}}]
    asked: Any = {"model": "", "messages": [{"role": "user", "content": "Hi"}], "tools": tools, "n": 2}
    async with running(default_model(), script) as service, http_client(service.url) as client:
        asked["model"] = (await client.models.list()).data[0].id
        if stream:
            async with client.chat.completions.stream(**asked) as events:
                choices: Any = (await events.get_final_completion()).choices
        else:
            choices = (await client.chat.completions.create(**asked)).choices
    assert [choice.finish_reason for choice in choices] == ["stop", "tool_calls"]
    assert [choice.message.content for choice in choices] == ["No.", "Sure."]
    (call,) = choices[1].message.tool_calls
    assert (call.function.name, call.function.arguments) == ("f", '{"a": [1, "é"]}')


TWO_CALLS = TEXT.replace("é", "e") + '\n<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>And more.'


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
@pytest.mark.parametrize("stream", [True, False])
async def test_at_most_one_call(path: str, stream: bool) -> None:
    """With parallel_tool_calls false the turn ends with its first call, and the engine works no more."""
    ids = ids_of(TWO_CALLS)
    needed = len(ids_of(TWO_CALLS[: TWO_CALLS.index("\n</tool_call>")]))
    cancelled = asyncio.Event()

    async def script(call: fe.FakeRequest) -> None:
        for token_id in ids:
            await call.send([token_id])
        await call.cancelled.wait()
        cancelled.set()
        await call.send([], call.finish(fe.CANCELLED))

    function: dict[str, Any] = {"name": "f", "parameters": json.loads(SCHEMA)}
    tool = {"type": "function", "function": function} if path == CHAT else {"type": "function", **function}
    body = body_of(path, tools=[tool], parallel_tool_calls=False, stream=stream)
    body |= {"stream_options": {"include_usage": True}} if stream and path == CHAT else {}
    async with running(default_model(), script) as service, http(service) as client:
        answer = await client.post(path, json=body)
        await asyncio.wait_for(cancelled.wait(), 5)
    assert answer.status_code == 200, answer.text
    assert "And more" not in answer.text
    assert answer.text.count("call_") >= 1
    calls, tokens = calls_of(path, answer.text)
    assert calls == [("f", {"a": [1, "e"]})]
    assert tokens == needed


def calls_of(path: str, text: str) -> tuple[list[tuple[str, Any]], int]:
    """The calls of an answer, streamed or not, and its completion tokens."""
    if path == RESPONSES:
        whole = events(text)[-1]["response"] if text.startswith("event") else json.loads(text)
        items = [item for item in whole["output"] if item["type"] == "function_call"]
        return [(item["name"], json.loads(item["arguments"])) for item in items], whole["usage"]["output_tokens"]
    if not text.startswith("data"):
        whole = json.loads(text)
        (choice,) = whole["choices"]
        assert choice["finish_reason"] == "tool_calls"
        found = [call["function"] for call in choice["message"]["tool_calls"]]
        return [(call["name"], json.loads(call["arguments"])) for call in found], whole["usage"]["completion_tokens"]
    *chunks, last, done = events(text)
    assert done == "[DONE]"
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    parts = [part for chunk in chunks for part in chunk["choices"][0]["delta"].get("tool_calls", [])]
    names = [part["function"]["name"] for part in parts if "id" in part]
    assert {part["index"] for part in parts} == {0}
    arguments = "".join(part["function"]["arguments"] for part in parts)
    return [(name, json.loads(arguments)) for name in names], last["usage"]["completion_tokens"]


async def test_at_most_one_forced_call_is_a_constraint() -> None:
    async with running(default_model(), play_text) as service:
        required = pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)
        await read(service.stub.Chat(request(tool_choice=required, parallel_tool_calls=False)))
        schema = json.loads(service.engine.requests[0].message.sampling.structured_output.json_schema)
        assert schema["maxItems"] == 1
        text, calls, end = await read(service.stub.Chat(request(parallel_tool_calls=False)))
        assert (text, [call[1] for call in calls], end.has_tool_calls) == ("Sure.", ["f"], True)


def test_a_marker_that_is_a_special_token_is_seen(tmp_path: Any) -> None:
    library = msp_tokenizer()
    library.add_special_tokens(["[TOOL_CALLS]"])
    marker = library.token_to_id("[TOOL_CALLS]")
    folder = write_folder(tmp_path, library, SPECIAL_NAMES, "{{ tools }}")
    encoder = PromptEncoder.load(folder, ChatLimits(10, 1000))
    assert (encoder.tool_format, encoder.tool_marker_ids) == (ToolFormat.MISTRAL, frozenset({marker}))
    assert encoder.new_detokenizer([], True, encoder.tool_marker_ids).add([1, marker]).strip() == "[TOOL_CALLS]"
    assert encoder.new_detokenizer([], True).add([1, marker]) == ""
