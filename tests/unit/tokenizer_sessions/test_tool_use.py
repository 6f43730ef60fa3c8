"""What tools mean for a generation: who reads calls, what is forced, what a forced call excludes."""

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from tokenizer_service.engines.messages import JsonObject, JsonSchema, SamplingOptions
from tokenizer_service.engines.refusal import invalid_field
from tokenizer_service.sessions.request import ConversationPrompt, TextPrompt
from tokenizer_service.sessions.tool_use import (
    MAX_FORCED_CALLS,
    forced_call_violations,
    in_words_of_tools,
    tool_constraint,
    tool_use,
)
from tokenizer_service.text.messages import Message, NamedTool, Tool, ToolChoice, ToolMode
from tokenizer_service.text.tool_formats import FORCED_SYNTAX, SYNTAXES, ToolFormat, call_id

TREE = {
    "type": "object",
    "properties": {"root": {"$ref": "#/$defs/node"}, "const": {"type": "integer"}, "properties": {"$ref": "#/$defs/n"}},
    "required": ["root"],
    "additionalProperties": False,
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"$ref": "#/$defs/n"}}},
        "n": {"enum": [1, {"$ref": "#/$defs/node"}]},
    },
}
TOOLS = (Tool("tree", None, json.dumps(TREE)), Tool("any"))
PROMPT = ConversationPrompt((Message("user", "Hi"),), 1, True, TOOLS)
PLAIN = SamplingOptions()


def forced(choice: ToolChoice) -> ConversationPrompt:
    return replace(PROMPT, tool_choice=choice)


@pytest.mark.parametrize("kind", list(SYNTAXES))
def test_calls_are_read_in_the_models_format(kind: ToolFormat) -> None:
    for choice in (None, ToolMode.AUTO):
        use = tool_use(replace(PROMPT, tool_choice=choice), PLAIN, kind)
        assert use is not None
        assert (use.names, use.syntax, use.constraint) == ({"tree", "any"}, SYNTAXES[kind], None)


def test_nothing_is_read_where_no_call_is_wanted() -> None:
    structured = SamplingOptions(structured_output=JsonObject())
    assert tool_use(forced(ToolMode.NONE), PLAIN, ToolFormat.HERMES) is None
    assert tool_use(replace(PROMPT, tools=()), PLAIN, ToolFormat.HERMES) is None
    assert tool_use(PROMPT, PLAIN, ToolFormat.NONE) is None
    assert tool_use(PROMPT, structured, ToolFormat.HERMES) is None
    assert tool_use(TextPrompt("a", True), PLAIN, ToolFormat.HERMES) is None


@pytest.mark.parametrize(("choice", "most"), [(ToolMode.REQUIRED, MAX_FORCED_CALLS), (NamedTool("tree"), 1)])
@pytest.mark.parametrize("kind", list(ToolFormat))
def test_a_forced_call_is_structured_output(choice: ToolChoice, most: int, kind: ToolFormat) -> None:
    use = tool_use(forced(choice), PLAIN, kind)
    assert use is not None
    assert use.syntax == FORCED_SYNTAX
    assert use.constraint is not None
    assert json.loads(use.constraint.schema)["maxItems"] == most


def test_at_most_one_call_in_a_turn() -> None:
    """Free, the text ends with it; forced, the constraint has no room for another."""
    prompt = replace(PROMPT, parallel_tool_calls=False)
    free = tool_use(prompt, PLAIN, ToolFormat.HERMES)
    assert free is not None
    assert free.new_parser(lambda: "").most_calls == 1
    for choice in (ToolMode.REQUIRED, NamedTool("tree")):
        use = tool_use(replace(prompt, tool_choice=choice), PLAIN, ToolFormat.HERMES)
        assert use is not None
        assert use.constraint is not None
        assert json.loads(use.constraint.schema)["maxItems"] == 1


ARGUMENTS: list[tuple[dict[str, Any], bool]] = [
    ({"root": {"next": {"next": {"n": 1}}}}, True),
    ({"root": {"next": {"next": {"n": 2}}}}, False),
    ({"root": {"n": {"$ref": "#/$defs/node"}}}, True),
    ({"root": {}, "const": 1, "properties": 1}, True),
    ({"root": {}, "const": "a"}, False),
    ({"root": {}, "more": 1}, False),
    ({}, False),
]


@pytest.mark.parametrize(("arguments", "fits"), ARGUMENTS)
def test_arguments_fit_the_tools_schema_wherever_it_stands(arguments: dict[str, Any], fits: bool) -> None:
    """Its references to itself are moved; data and names that look like keywords are not."""
    schema = json.loads(tool_constraint(TOOLS, 2).schema)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert jsonschema.Draft202012Validator(TREE).is_valid(arguments) == fits
    validator = jsonschema.Draft202012Validator(schema)
    call = {"name": "tree", "arguments": arguments}
    assert validator.is_valid([call]) == fits
    assert validator.is_valid([{"name": "any", "arguments": {"x": 1}}, call]) == fits
    assert not validator.is_valid([])
    assert not validator.is_valid([call] * 3)
    assert not validator.is_valid([{"name": "other", "arguments": {}}])


@pytest.mark.parametrize("choice", [ToolMode.REQUIRED, NamedTool("tree")])
def test_what_a_forced_call_excludes(choice: ToolChoice) -> None:
    field = "tool_choice.name" if isinstance(choice, NamedTool) else "tool_choice.mode"
    prompt = forced(choice)
    assert list(forced_call_violations(prompt, PLAIN)) == []
    structured = SamplingOptions(structured_output=JsonSchema("{}"), ignore_eos=True)
    fields = [violation.field for violation in forced_call_violations(prompt, structured)]
    assert fields == [field, "options.sampling.ignore_eos"]
    assert list(forced_call_violations(PROMPT, structured)) == []
    large = replace(prompt, tools=(Tool("tree", None, json.dumps({"enum": ["x" * 65_500]})),))
    (violation,) = forced_call_violations(large, PLAIN)
    assert violation.field == "tools"
    deep = replace(prompt, tools=(Tool("tree", None, '{"not":' * 70 + "{}" + "}" * 70),))
    (violation,) = forced_call_violations(deep, PLAIN)
    assert violation.field == "tools[0].parameters"


def test_an_engines_refusal_of_the_constraint_names_the_tools() -> None:
    refusal = invalid_field("options.sampling.structured_output.json_schema", "not a usable JSON schema")
    assert in_words_of_tools(refusal) == invalid_field("tools", "not a usable JSON schema")
    other = invalid_field("options.sampling.top_k", "wrong")
    assert in_words_of_tools(other) is other


def test_ids_of_calls_differ_and_fit_the_family() -> None:
    draws = random.Random(1)
    for kind in ToolFormat:
        ids = {call_id(kind, draws.getrandbits(63)) for _ in range(1000)}
        assert len(ids) == 1000
        assert all(len(i) == 9 and i.isalnum() for i in ids) == (kind is ToolFormat.MISTRAL)
