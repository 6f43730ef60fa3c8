"""Requests as clients write them: what they mean, and how a wrong one is named."""

from typing import Any

import pytest

from tokenizer_service.engines.messages import Choice, Grammar, JsonObject, JsonSchema, Regex, SamplingOptions
from tokenizer_service.http.chat_fields import ChatFields, chat_prompt, chat_sampling
from tokenizer_service.http.completion_fields import CompletionFields, completion_prompts, completion_sampling
from tokenizer_service.http.errors import HttpError
from tokenizer_service.http.fields import Fields, read_fields
from tokenizer_service.http.generation_fields import generation_options
from tokenizer_service.http.response_fields import ResponseFields, response_prompt, response_sampling
from tokenizer_service.sessions.request import ConversationPrompt, IdsPrompt, TextPrompt
from tokenizer_service.text.messages import Message, NamedTool, Tool, ToolCall, ToolMode

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "sum", "parameters": {"type": "object"}}}


def read(kind: type[Fields], value: dict[str, Any]) -> Any:
    fields = read_fields(kind, value)
    assert not isinstance(fields, HttpError), fields
    return fields


def chat(**fields: Any) -> Any:
    return read(ChatFields, {"messages": HELLO, **fields})


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": HELLO, "nonsense": 1}, "nonsense"),
        ({"messages": HELLO, "temperature": "1"}, "temperature"),
        ({"messages": HELLO, "temperature": True}, "temperature"),
        ({"messages": HELLO, "temperature": 10**400}, "temperature"),
        ({"messages": HELLO, "max_tokens": 1.5}, "max_tokens"),
        ({"messages": HELLO, "max_tokens": 2**63}, "max_tokens"),
        ({"messages": HELLO, "seed": 2**63}, "seed"),
        ({"messages": HELLO, "priority": 2**31}, "priority"),
        ({"messages": HELLO, "stream": "yes"}, "stream"),
        ({"messages": HELLO, "stop": 5}, "stop"),
        ({"messages": HELLO, "stop": ["a", 5]}, "stop[1]"),
        ({"messages": HELLO, "stop_token_ids": ["2"]}, "stop_token_ids[0]"),
        ({"messages": HELLO, "logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"messages": HELLO, "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"messages": HELLO, "tool_choice": "maybe"}, "tool_choice"),
        ({"messages": HELLO, "response_format": {"type": "xml"}}, "response_format"),
        ({"messages": HELLO, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"messages": [{"content": "hi"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "hi", "colour": 1}]}, "messages[0].colour"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
        ),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": ["hi"]}, "messages[0]"),
    ],
)
def test_a_wrong_field_is_named(value: dict[str, Any], param: str) -> None:
    answer = read_fields(ChatFields, value)
    assert isinstance(answer, HttpError), answer
    assert (answer.status, answer.param) == (400, param)
    assert answer.message.startswith(f"{param}: ")
    assert "Fields" not in answer.message
    assert "pydantic" not in answer.message


def test_null_is_unset() -> None:
    names = set(ChatFields.model_fields) - {"messages"}
    assert chat(**dict.fromkeys(names)) == chat()


def test_messages_become_turns() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    fields = read(
        ChatFields,
        {
            "messages": [
                {"role": "developer", "content": "be brief"},
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                    "name": "bo",
                },
                {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
                {"role": "tool", "content": "3", "tool_call_id": "c1"},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "add"}},
        },
    )
    prompt = chat_prompt(fields)
    assert isinstance(prompt, ConversationPrompt)
    assert prompt.messages == (
        Message("system", "be brief"),
        Message("user", "a\nb", name="bo"),
        Message("assistant", "", (ToolCall("c1", "add", '{"a": 1}'),)),
        Message("tool", "3", tool_call_id="c1"),
    )
    assert prompt.tools == (Tool("add", "sum", '{"type": "object"}'),)
    assert prompt.tool_choice == NamedTool("add")
    assert prompt.add_generation_prompt


def test_continuing_the_last_message_opens_no_turn() -> None:
    prompt = chat_prompt(chat(continue_final_message=True))
    assert isinstance(prompt, ConversationPrompt)
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (False, True)


def test_a_null_in_the_stream_options_is_not_set() -> None:
    made = chat_prompt(chat(stream=True, stream_options={"include_usage": None, "continuous_usage_stats": None}))
    assert isinstance(made, ConversationPrompt)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"best_of": 2}, "best_of"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 129}, "bad_words"),
    ],
)
def test_what_chat_refuses(fields: dict[str, Any], param: str) -> None:
    answer = chat_prompt(chat(**fields))
    assert isinstance(answer, HttpError)
    assert answer.param == param


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, JsonObject()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"b": 1, "a": 2}, "strict": True},
                }
            },
            JsonSchema('{"b": 1, "a": 2}'),
        ),
        ({"structured_outputs": {"regex": "a+"}}, Regex("a+")),
        ({"structured_outputs": {"json": {"type": "object"}}}, JsonSchema('{"type": "object"}')),
        ({"structured_outputs": {"json_object": True}}, JsonObject()),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Choice(("a", "b"))),
        ({"structured_outputs": {"grammar": "root ::= x"}}, Grammar("root ::= x")),
        ({"guided_json": '{"type": "object"}'}, JsonSchema('{"type": "object"}')),
        ({"guided_regex": "b"}, Regex("b")),
        ({"guided_choice": ["a"]}, Choice(("a",))),
        ({"guided_grammar": "g"}, Grammar("g")),
    ],
)
def test_every_way_to_ask_for_structure(fields: dict[str, Any], expected: object) -> None:
    sampling = chat_sampling(chat(**fields))
    assert not isinstance(sampling, HttpError)
    assert sampling[1].structured_output == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}, "guided_regex": "a"},
        {"structured_outputs": {"regex": "a", "choice": ["b"]}},
        {"structured_outputs": {}},
    ],
)
def test_two_structures_or_none_are_refused(fields: dict[str, Any]) -> None:
    answer = chat_sampling(chat(**fields))
    assert isinstance(answer, HttpError)
    assert answer.status == 400


def test_every_sampling_field_arrives() -> None:
    fields = chat(
        temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=-7, stop="x", stop_token_ids=[3], ignore_eos=True,
        min_tokens=2, max_completion_tokens=9, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.2,
        logit_bias={"5": -100, "6": 1.5}, allowed_token_ids=[1, 2], banned_token_ids=[4], n=3, logprobs=True,
        top_logprobs=4, prompt_logprobs=1, include_stop_str_in_output=True, skip_special_tokens=False,
        cache_salt="s", priority=-3, user="u", metadata={"a": "b"}, store=True,
    )  # fmt: skip
    sampling = chat_sampling(fields)
    assert not isinstance(sampling, HttpError)
    options = generation_options(fields, sampling[1], ((7, 8),))
    assert not isinstance(options, HttpError)
    assert options.sampling == SamplingOptions(
        max_tokens=9, min_tokens=2, temperature=0.5, top_k=5, top_p=0.9, min_p=0.1, seed=-7, stop_token_ids=(3,),
        ignore_eos=True, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=-0.5,
        logit_bias=((5, -100.0), (6, 1.5)), allowed_token_ids=(1, 2), banned_token_ids=(4,), bad_words=((7, 8),),
        logprobs=4, prompt_logprobs=1, n=3,
    )  # fmt: skip
    assert (options.stops, options.include_stop, options.skip_special_tokens) == (("x",), True, False)
    assert (options.cache_salt, options.priority) == ("s", -3)


@pytest.mark.parametrize("key", ["x", "", "1.5", "9" * 30, "--1"])
def test_a_bias_of_no_token_is_refused(key: str) -> None:
    answer = generation_options(chat(logit_bias={key: 1.0}), SamplingOptions(), ())
    assert isinstance(answer, HttpError)
    assert answer.param == "logit_bias"


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", [TextPrompt("a", True)]),
        (["a", "b"], [TextPrompt("a", True), TextPrompt("b", True)]),
        ([1, 2], [IdsPrompt((1, 2))]),
        ([[1], [2, 3]], [IdsPrompt((1,)), IdsPrompt((2, 3))]),
        (["a", [1]], [TextPrompt("a", True), IdsPrompt((1,))]),
        ([[]], [IdsPrompt(())]),
        ([], [IdsPrompt(())]),
    ],
)
def test_prompts_of_every_form(prompt: object, expected: list[object]) -> None:
    assert completion_prompts(read(CompletionFields, {"prompt": prompt})) == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": 5}, "prompt"),
        ({"prompt": [1, True]}, "prompt[1]"),
        ({"prompt": [1, 2.5]}, "prompt[1]"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": [[1], ["a"]]}, "prompt[1][0]"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "best_of": 4}, "best_of"),
    ],
)
def test_what_completions_refuse(fields: dict[str, Any], param: str) -> None:
    answer = completion_prompts(read(CompletionFields, fields))
    assert isinstance(answer, HttpError)
    assert answer.param == param


def test_echoed_log_probabilities_include_the_prompt() -> None:
    echoed = completion_sampling(read(CompletionFields, {"prompt": "a", "echo": True, "logprobs": 2}))
    plain = completion_sampling(read(CompletionFields, {"prompt": "a", "logprobs": 2}))
    assert not isinstance(echoed, HttpError)
    assert not isinstance(plain, HttpError)
    assert (echoed[1].logprobs, echoed[1].prompt_logprobs) == (2, 2)
    assert (plain[1].logprobs, plain[1].prompt_logprobs) == (2, None)
    assert plain[1].max_tokens == 16


def test_a_response_request_becomes_a_conversation() -> None:
    fields = read(
        ResponseFields,
        {
            "instructions": "be brief",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]},
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                {"type": "function_call", "call_id": "d", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "3"},
            ],
            "tools": [{"type": "function", "name": "add", "parameters": {}}],
            "tool_choice": "required",
            "max_output_tokens": 5,
            "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "object"}}},
        },
    )
    prompt = response_prompt(fields)
    assert isinstance(prompt, ConversationPrompt)
    assert prompt.messages == (
        Message("system", "be brief"),
        Message("user", "1+2?"),
        Message("assistant", "", (ToolCall("c", "add", "{}"), ToolCall("d", "add", "{}"))),
        Message("tool", "3", tool_call_id="c"),
    )
    assert (prompt.tools, prompt.tool_choice) == ((Tool("add", None, "{}"),), ToolMode.REQUIRED)
    sampling = response_sampling(fields)
    assert sampling.max_tokens == 5
    assert sampling.structured_output == JsonSchema('{"type": "object"}')


@pytest.mark.parametrize(
    "more", [{"previous_response_id": "r"}, {"background": True}, {"truncation": "auto"}, {"include": ["x"]}]
)
def test_what_responses_refuse(more: dict[str, Any]) -> None:
    answer = read_fields(ResponseFields, {"input": "hi", **more})
    assert isinstance(answer, HttpError)
    assert answer.param == next(iter(more))
