"""What the client refuses before sending, and what it puts on the wire."""

import math
from dataclasses import fields
from typing import Any

import pytest

from tokenwire.common.v1 import health_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client import convert
from tokenwire_client.errors import ErrorCode, InvalidRequest
from tokenwire_client.structured import Choice, JsonSchema, Regex
from tokenwire_client.tools import NamedTool, Tool, ToolCall
from tokenwire_client.types import DEFAULT_SAMPLING, HealthStatus, Message, Sampling

INT64 = "must be an integer from -2^63 to 2^63 - 1, got "
UINT32 = "must be an integer from 0 to 2^32 - 1, got "
TEXT = "must be text without lone surrogates, got "
BOOL = "must be true or false, got "
INT32 = "must be an integer from -2^31 to 2^31 - 1, got "
PAIRS = "must be from an integer from -2^63 to 2^63 - 1 to a number, got "
HI = Message("user", "hi")


def generate(prompt: Any = "p", sampling: Sampling = DEFAULT_SAMPLING, **identity: Any) -> pb.GenerateRequest:
    add_special_tokens = identity.pop("add_special_tokens", None)
    return convert.generate_request(
        prompt, sampling, convert.Identity(**identity), add_special_tokens=add_special_tokens
    )


def sampled(**knobs: Any) -> pb.GenerateRequest:
    return generate(sampling=Sampling(**knobs))


def chat(messages: Any, tool_choice: Any = None, **rendering: Any) -> pb.ChatRequest:
    return convert.chat_request(
        messages, DEFAULT_SAMPLING, convert.Identity(), convert.Rendering(**rendering), tool_choice=tool_choice
    )


def tokenize(source: Any, **rendering: Any) -> pb.TokenizeRequest:
    return convert.tokenize_request(source, convert.Rendering(**rendering), model="", add_special_tokens=None)


def detokenize(token_ids: Any) -> pb.DetokenizeRequest:
    return convert.detokenize_request(token_ids, model="", skip_special_tokens=None)


REFUSED = [
    (lambda: sampled(seed=2**63), "options.sampling.seed", f"{INT64}{2**63}"),
    (lambda: sampled(seed=2**64), "options.sampling.seed", f"{INT64}{2**64}"),
    (lambda: sampled(seed=-(2**63) - 1), "options.sampling.seed", f"{INT64}{-(2**63) - 1}"),
    (lambda: sampled(max_tokens=1.5), "options.sampling.max_tokens", f"{INT64}1.5"),
    (lambda: sampled(max_tokens=True), "options.sampling.max_tokens", f"{INT64}True"),
    (
        lambda: sampled(temperature="hot"),
        "options.sampling.temperature",
        "must be a number, got 'hot'",
    ),
    (
        lambda: sampled(temperature=10**400),
        "options.sampling.temperature",
        f"must be a number, got 1{'0' * 56}...",
    ),
    (lambda: sampled(ignore_eos=1), "options.sampling.ignore_eos", f"{BOOL}1"),
    (
        lambda: sampled(skip_special_tokens="no"),
        "options.skip_special_tokens",
        f"{BOOL}'no'",
    ),
    (lambda: sampled(stop=("a", "\ud800")), "options.stop[1]", rf"{TEXT}'\ud800'"),
    (lambda: sampled(stop=(b"a",)), "options.stop[0]", f"{TEXT}b'a'"),
    (lambda: sampled(stop="abc"), "options.stop", "must be a list, got 'abc'"),
    (
        lambda: sampled(stop_token_ids=[1, 2**63]),
        "options.sampling.stop_token_ids[1]",
        f"{INT64}{2**63}",
    ),
    (lambda: sampled(n=1.5), "options.sampling.n", f"{INT64}1.5"),
    (lambda: sampled(logit_bias=[1]), "options.sampling.logit_bias", "must be a mapping, got [1]"),
    (lambda: sampled(logit_bias={"a": 1.0}), "options.sampling.logit_bias", f"{PAIRS}'a': 1.0"),
    (lambda: sampled(logit_bias={1: True}), "options.sampling.logit_bias", f"{PAIRS}1: True"),
    (lambda: sampled(logit_bias={2**63: 1}), "options.sampling.logit_bias", f"{PAIRS}{2**63}: 1"),
    (lambda: sampled(bad_words=[[1], 2]), "options.sampling.bad_words[1]", "must be a list, got 2"),
    (lambda: sampled(bad_words=[[1, "2"]]), "options.sampling.bad_words[0][1]", f"{INT64}'2'"),
    (lambda: sampled(allowed_token_ids="12"), "options.sampling.allowed_token_ids", "must be a list, got '12'"),
    (
        lambda: sampled(structured_output="x"),
        "options.sampling.structured_output",
        "must be a JsonSchema, JsonObject, Regex, Grammar or Choice, got 'x'",
    ),
    (
        lambda: sampled(structured_output=JsonSchema(7)),  # type: ignore[arg-type]
        "options.sampling.structured_output.json_schema",
        f"{TEXT}7",
    ),
    (
        lambda: sampled(structured_output=JsonSchema({"a": math.nan})),
        "options.sampling.structured_output.json_schema",
        "cannot be written as JSON: a number is not finite, or the nesting has no end",
    ),
    (
        lambda: sampled(structured_output=Choice("ab")),
        "options.sampling.structured_output.choice.values",
        "must be a list, got 'ab'",
    ),
    (
        lambda: sampled(structured_output=Regex("\ud800")),
        "options.sampling.structured_output.regex",
        rf"{TEXT}'\ud800'",
    ),
    (lambda: generate(priority=2**31), "options.priority", f"{INT32}{2**31}"),
    (lambda: chat([HI], tools="ab"), "tools", "must be a list, got 'ab'"),
    (lambda: chat([HI], tools=["f"]), "tools[0]", "must be a tool, got 'f'"),
    (lambda: chat([HI], tools=[Tool("f"), Tool(7)]), "tools[1].name", f"{TEXT}7"),  # type: ignore[arg-type]
    (lambda: chat([HI], tools=[Tool("f", parameters=5)]), "tools[0].parameters", f"{TEXT}5"),  # type: ignore[arg-type]
    (
        lambda: chat([HI], tools=[Tool("f", parameters={"a": {1}})]),
        "tools[0].parameters",
        "cannot be written as JSON: {1} is no JSON value",
    ),
    (lambda: chat([HI], tool_choice="auto"), "tool_choice", "must be a ToolMode or NamedTool, got 'auto'"),
    (lambda: chat([HI], tool_choice=NamedTool(b"f")), "tool_choice.name", f"{TEXT}b'f'"),  # type: ignore[arg-type]
    (
        lambda: chat([Message("assistant", "", tool_calls=["x"])]),  # type: ignore[list-item]
        "messages[0].tool_calls[0]",
        "must be a tool call, got 'x'",
    ),
    (
        lambda: chat([Message("assistant", "", tool_calls=[ToolCall("c", "f", {})])]),  # type: ignore[arg-type]
        "messages[0].tool_calls[0].arguments",
        f"{TEXT}{{}}",
    ),
    (lambda: tokenize("a", tools=[Tool("f")]), "conversation.tools", "is for messages, and the input is text"),
    (
        lambda: tokenize([HI], continue_final_message=1),
        "conversation.continue_final_message",
        f"{BOOL}1",
    ),
    (lambda: generate("a\udfff"), "text", rf"{TEXT}'a\udfff'"),
    (lambda: generate(b"ab"), "token_ids.ids", "must be a list, got b'ab'"),
    (lambda: generate(None), "token_ids.ids", "must be a list, got None"),
    (lambda: generate([1, -1]), "token_ids.ids[1]", f"{UINT32}-1"),
    (lambda: generate([2**32]), "token_ids.ids[0]", f"{UINT32}{2**32}"),
    (lambda: generate([1, "2"]), "token_ids.ids[1]", f"{UINT32}'2'"),
    (lambda: generate(model="\ud800"), "model", rf"{TEXT}'\ud800'"),
    (lambda: generate(cache_salt=7), "options.cache_salt", f"{TEXT}7"),
    (lambda: generate(request_id="\ud800"), "request_id", rf"{TEXT}'\ud800'"),
    (lambda: chat("hello"), "messages", "must be a list, got 'hello'"),
    (lambda: chat(["hello"]), "messages[0]", "must be a message, got 'hello'"),
    (
        lambda: chat([Message("user", "a"), Message("user", "\ud800")]),
        "messages[1].content",
        rf"{TEXT}'\ud800'",
    ),
    (lambda: chat([Message(1, "a")]), "messages[0].role", f"{TEXT}1"),
    (lambda: tokenize("\ud800"), "text", rf"{TEXT}'\ud800'"),
    (
        lambda: tokenize("a", add_generation_prompt=True),
        "conversation.add_generation_prompt",
        "is for messages, and the input is text",
    ),
    (lambda: detokenize([2**63]), "token_ids[0]", f"{INT64}{2**63}"),
    (lambda: detokenize(5), "token_ids", "must be a list, got 5"),
]


@pytest.mark.parametrize(("build", "field", "description"), REFUSED, ids=[row[1] + row[2][-9:] for row in REFUSED])
def test_a_value_the_wire_cannot_carry_is_refused_with_its_field(build: Any, field: str, description: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build()
    assert caught.value.code is ErrorCode.INVALID_ARGUMENT
    assert [(v.field, v.description) for v in caught.value.field_violations] == [(field, description)]
    assert str(caught.value) == f"{field}: {description}"


KNOBS = [
    ("max_tokens", 0),
    ("min_tokens", 0),
    ("temperature", 0.0),
    ("top_k", 0),
    ("top_p", 1.0),
    ("min_p", 0.0),
    ("seed", 0),
    ("seed", -(2**63)),
    ("ignore_eos", False),
    ("repetition_penalty", 1.0),
    ("presence_penalty", 0.0),
    ("frequency_penalty", 0.0),
    ("logprobs", 0),
    ("prompt_logprobs", 0),
    ("n", 0),
]


@pytest.mark.parametrize(("name", "value"), KNOBS)
def test_zero_is_sent_and_unset_is_not_b091(name: str, value: Any) -> None:
    """B091: an explicit 0 or false reaches the service, and None leaves the field unset."""
    params = pb.GenerateRequest.FromString(
        generate(sampling=Sampling(**{name: value})).SerializeToString()
    ).options.sampling
    assert params.HasField(name)
    assert getattr(params, name) == value
    assert [f.name for f, _ in params.ListFields()] == [name]


@pytest.mark.parametrize("name", ["include_stop_str_in_output", "skip_special_tokens"])
@pytest.mark.parametrize("value", [True, False])
def test_switches_of_the_options_are_sent_when_set_b091(name: str, value: bool) -> None:
    options = generate(sampling=Sampling(**{name: value})).options
    assert options.HasField(name)
    assert getattr(options, name) is value


def test_nothing_is_sent_for_an_unset_sampling() -> None:
    request = generate()
    assert request.options.sampling.ListFields() == []
    assert [f.name for f, _ in request.ListFields()] == ["text"]


def test_every_knob_of_the_contract_can_be_set_from_the_library() -> None:
    names = {field.name for field in fields(Sampling)}
    params = {field.name for field in pb.GenerationOptions.DESCRIPTOR.fields_by_name["sampling"].message_type.fields}
    options = {field.name for field in pb.GenerationOptions.DESCRIPTOR.fields}
    assert names == params | (options - {"sampling", "cache_salt", "priority"})


def test_non_finite_numbers_are_the_services_to_refuse() -> None:
    assert math.isnan(generate(sampling=Sampling(temperature=math.nan)).options.sampling.temperature)


@pytest.mark.parametrize(
    ("request_", "arm"),
    [
        (generate(""), "text"),
        (generate([]), "token_ids"),
        (generate("a"), "text"),
        (generate([0]), "token_ids"),
    ],
)
def test_an_empty_prompt_still_says_what_it_is(request_: pb.GenerateRequest, arm: str) -> None:
    assert pb.GenerateRequest.FromString(request_.SerializeToString()).WhichOneof("prompt") == arm


def test_tokenize_takes_text_or_messages() -> None:
    assert tokenize("").WhichOneof("input") == "text"
    conversation = tokenize([Message("user", "a")], add_generation_prompt=False)
    assert conversation.conversation.messages[0] == pb.ChatMessage(role="user", content="a")
    assert conversation.conversation.HasField("add_generation_prompt")
    assert tokenize([]).WhichOneof("input") == "conversation"


def test_detokenize_sends_wrong_ids_for_the_service_to_refuse() -> None:
    assert list(detokenize([-1, 2**32]).token_ids) == [-1, 2**32]


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (0, HealthStatus.UNKNOWN),
        (1, HealthStatus.SERVING),
        (2, HealthStatus.NOT_SERVING),
        (3, HealthStatus.SERVICE_UNKNOWN),
        (99, HealthStatus.UNKNOWN),
    ],
)
def test_health_statuses(number: int, status: HealthStatus) -> None:
    answer = health_pb2.HealthAnswer.FromString(bytes([8, number]))
    health = convert.health_from(answer)
    assert (health.status, health.serving) == (status, status is HealthStatus.SERVING)
