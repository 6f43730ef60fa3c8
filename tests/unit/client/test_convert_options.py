"""Everything that a request can say, as a message."""

from types import MappingProxyType
from typing import Any

import pytest

from tokenwire.common.v1.sampling_pb2 import SamplingParams
from tokenwire.common.v1.sampling_pb2 import StructuredOutput as Message
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client import convert
from tokenwire_client.convert_options import sampling_from
from tokenwire_client.structured import Choice, Grammar, JsonObject, JsonSchema, Regex
from tokenwire_client.tools import NamedTool, Tool, ToolCall, ToolMode
from tokenwire_client.types import DEFAULT_SAMPLING, Sampling
from tokenwire_client.types import Message as Turn

EVERYTHING = Sampling(
    max_tokens=5,
    min_tokens=1,
    temperature=0.5,
    top_k=3,
    top_p=0.25,
    min_p=0.125,
    seed=-1,
    stop_token_ids=(7,),
    ignore_eos=False,
    repetition_penalty=1.5,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    logit_bias={3: -1.5, 4: 2.0},
    allowed_token_ids=(3, 4),
    banned_token_ids=(5,),
    bad_words=((1, 2), (3,)),
    logprobs=0,
    prompt_logprobs=2,
    n=2,
    structured_output=Choice(("a", "b")),
)


def params(sampling: Sampling) -> SamplingParams:
    request = convert.generate_request("p", sampling, convert.Identity(), add_special_tokens=None)
    return pb.GenerateRequest.FromString(request.SerializeToString()).options.sampling


def test_nothing_is_lost_on_the_way_to_the_service_and_back() -> None:
    message = params(EVERYTHING)
    assert {field.name for field, _ in message.ListFields()} == {field.name for field in message.DESCRIPTOR.fields}
    assert sampling_from(message) == EVERYTHING
    assert sampling_from(SamplingParams()) == DEFAULT_SAMPLING


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (JsonSchema('{"a": 1}'), Message(json_schema='{"a": 1}')),
        (JsonSchema({"ä": [1, {"b": None}]}), Message(json_schema='{"ä": [1, {"b": null}]}')),
        (JsonSchema(MappingProxyType({"a": MappingProxyType({})})), Message(json_schema='{"a": {}}')),
        (JsonSchema(True), Message(json_schema="true")),
        (JsonObject(), Message(json_object=True)),
        (Regex("a+"), Message(regex="a+")),
        (Grammar(""), Message(grammar="")),
        (Choice(["x"]), Message(choice={"values": ["x"]})),
        (Choice(()), Message(choice={})),
    ],
)
def test_structured_outputs(output: Any, message: Message) -> None:
    assert params(Sampling(structured_output=output)).structured_output == message


@pytest.mark.parametrize("priority", [None, 0, -5])
def test_identity(priority: int | None) -> None:
    identity = convert.Identity("m", "r", "s", priority)
    request = convert.generate_request([1], DEFAULT_SAMPLING, identity, add_special_tokens=None)
    assert (request.model, request.request_id, request.options.cache_salt) == ("m", "r", "s")
    assert request.options.HasField("priority") == (priority is not None)
    assert request.options.priority == (priority or 0)


TURNS = [
    Turn("user", "a"),
    Turn("assistant", "", tool_calls=[ToolCall("c", "f", "{}")]),
    Turn("tool", "1", tool_call_id="c", name="f"),
]
MESSAGES = [
    pb.ChatMessage(role="user", content="a"),
    pb.ChatMessage(role="assistant", content="", tool_calls=[pb.ToolCall(id="c", name="f", arguments="{}")]),
    pb.ChatMessage(role="tool", content="1", tool_call_id="c", name="f"),
]
RENDERING = convert.Rendering(
    add_generation_prompt=False,
    continue_final_message=True,
    tools=[Tool("f", "d", {"type": "object"}), Tool("g", parameters="{}")],
    chat_template="t",
)
TOOLS = [pb.Tool(name="f", description="d", parameters='{"type": "object"}'), pb.Tool(name="g", parameters="{}")]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (None, None),
        (ToolMode.AUTO, pb.ToolChoice(mode=pb.ToolChoice.MODE_AUTO)),
        (ToolMode.NONE, pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE)),
        (ToolMode.REQUIRED, pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)),
        (NamedTool(""), pb.ToolChoice(name="")),
    ],
)
def test_a_chat_with_tools(choice: Any, message: pb.ToolChoice | None) -> None:
    request = convert.chat_request(
        TURNS, DEFAULT_SAMPLING, convert.Identity(), RENDERING, tool_choice=choice, parallel_tool_calls=False
    )
    assert request == pb.ChatRequest(
        messages=MESSAGES,
        tools=TOOLS,
        tool_choice=message,
        parallel_tool_calls=False,
        add_generation_prompt=False,
        continue_final_message=True,
        chat_template="t",
    )
    assert request.HasField("tool_choice") == (message is not None)


def test_a_conversation_with_tools_is_tokenized() -> None:
    request = convert.tokenize_request(TURNS, RENDERING, model="m", add_special_tokens=None)
    assert request == pb.TokenizeRequest(
        model="m",
        conversation=pb.Conversation(
            messages=MESSAGES,
            tools=TOOLS,
            add_generation_prompt=False,
            continue_final_message=True,
            chat_template="t",
        ),
    )


def test_the_defaults_of_a_model() -> None:
    answer = pb.ListModelsResponse(models=[pb.Model(name="a"), pb.Model(name="b", default_sampling={"top_k": 0})])
    first, second = convert.models_from(answer)
    assert (first.default_sampling, second.default_sampling) == (None, Sampling(top_k=0))
