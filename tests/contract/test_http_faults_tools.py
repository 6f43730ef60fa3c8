"""Area 7 of the known faults over HTTP: turns that call tools, their results, and what the model sees of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.fixtures import fake_engine as fe
from tests.fixtures.chat_templates import LLAMA3_LIKE, MISTRAL_LIKE, QWEN_LIKE
from tests.fixtures.http_calls import CHAT, RESPONSES, http
from tests.fixtures.tokenizer_app import default_model, model_info, running
from tests.fixtures.tokenizers_made import SPECIAL_NAMES, msp_tokenizer, write_folder
from tokenizer_service.app import load_model
from tokenizer_service.config import TokenizerSettings

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "of a city", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FUNCTION}]


def call(number: int, city: str) -> dict[str, Any]:
    """Arguments as a client sends them: JSON in a string."""
    arguments = json.dumps({"city": city, "n": number}, ensure_ascii=False)
    return {
        "id": f"abcdef00{number}",
        "type": "function",
        "function": {"name": "weather", "arguments": arguments},
    }


def result(number: int, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"abcdef00{number}", "content": content}


def turns(several_calls: bool) -> list[dict[str, Any]]:
    """Three rounds: a call alone (content null), words and a call (or two), and a last question."""
    second = [call(2, "Z\u00fcrich"), call(3, "Rome")] if several_calls else [call(2, "Z\u00fcrich")]
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather in Paris?"},
        {"role": "assistant", "content": None, "tool_calls": [call(1, "Paris")]},
        result(1, "sunny"),
        {"role": "assistant", "content": "It is sunny."},
        {"role": "user", "content": "And there?"},
        {"role": "assistant", "content": None, "tool_calls": second},
        result(2, "grey"),
        *([result(3, "hot")] if several_calls else []),
        {"role": "user", "content": "Where shall I go?"},
    ]


def as_templates_want(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Arguments as objects, and content that is text: what templates are written for."""
    made = []
    for message in messages:
        calls = [
            each | {"function": each["function"] | {"arguments": json.loads(each["function"]["arguments"])}}
            for each in message.get("tool_calls", [])
        ]
        made.append(message | {"content": message["content"] or ""} | ({"tool_calls": calls} if calls else {}))
    return made


def as_items(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same conversation as input of the Responses API."""
    items = list[dict[str, Any]]()
    for message in messages:
        if message["role"] == "tool":
            item = {"call_id": message["tool_call_id"], "output": message["content"]}
            items.append({"type": "function_call_output", **item})
        elif message.get("tool_calls"):
            items += [
                {"type": "function_call", "call_id": each["id"], **each["function"]} for each in message["tool_calls"]
            ]
        else:
            items.append({"role": message["role"], "content": message["content"]})
    return items


async def end(request: fe.FakeRequest) -> None:
    await request.play([5], eos=2)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("template", "several"),
    [(QWEN_LIKE, True), (MISTRAL_LIKE, True), (LLAMA3_LIKE, False)],
    ids=["qwen", "mistral", "llama3"],
)
async def test_tool_turns_reach_the_model_as_its_template_writes_them(
    tmp_path: Path, template: str, several: bool, stream: bool
) -> None:
    """B103: several rounds of calls and results, over chat and over responses, to the token."""
    model = load_model(write_folder(tmp_path, msp_tokenizer(), SPECIAL_NAMES, template), TokenizerSettings())
    library = AutoTokenizer.from_pretrained(tmp_path)
    messages = turns(several)
    expected = library.apply_chat_template(
        as_templates_want(messages), tools=TOOLS, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    info = model_info(model, vocab_size=273)
    async with running(model, end, infos=[info]) as service, http(service) as client:
        answers = [
            await client.post(CHAT, json={"messages": messages, "tools": TOOLS, "stream": stream}),
            await client.post(
                RESPONSES,
                json={"input": as_items(messages), "tools": [{"type": "function", **FUNCTION}], "stream": stream},
            ),
        ]
        assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
        assert [request.prompt for request in service.engine.requests] == [expected, expected]
        counted = await client.post("/tokenize", json={"messages": messages, "tools": TOOLS})
        assert counted.json()["tokens"] == expected


async def test_tool_turns_through_a_template_that_knows_none() -> None:
    """B103: the default model's; every turn is there, in order and once."""
    async with running(default_model(), end) as service, http(service) as client:
        answer = await client.post(CHAT, json={"messages": turns(True), "tools": TOOLS})
        assert answer.status_code == 200
        (request,) = service.engine.requests
        shown = await client.post("/detokenize", json={"tokens": request.prompt, "skip_special_tokens": False})
    text = shown.json()["prompt"]
    needed = [
        "Be brief.", '"name": "weather"', "Weather in Paris?", '"city": "Paris", "n": 1', "sunny", "It is sunny.",
        "And there?", '"city": "Z\u00fcrich", "n": 2', '"city": "Rome", "n": 3', "grey", "hot", "Where shall I go?",
    ]  # fmt: skip
    places = [text.find(part) for part in needed]
    assert places == sorted(places)
    assert places[0] >= 0
    assert text.count('{"name": "weather", "arguments": {"city": ') == 3
    assert text.count("\n<tool_response>\n") == 3


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_without_content_and_without_calls_is_refused(stream: bool) -> None:
    """B103: it would vanish."""
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None}, *turns(False)[-1:]]
    async with running(default_model(), end) as service, http(service) as client:
        answer = await client.post(CHAT, json={"messages": messages, "stream": stream})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "messages[1].content"
        assert service.engine.requests == []
