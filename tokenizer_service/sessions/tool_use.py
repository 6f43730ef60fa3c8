"""What tools mean for one generation: how calls are read out of its text, and what makes the model call.

A forced call (`tool_choice` required or a name) is structured output: a JSON array of calls, whatever the
model's own format, each with arguments that fit the tool's schema.

Must not know: grpc, protobuf, templates, how constraints are kept.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizer_service.engines.messages import JsonSchema, SamplingOptions
from tokenizer_service.engines.refusal import Refusal, Violation, invalid
from tokenizer_service.sessions.request import ConversationPrompt, Prompt
from tokenizer_service.sessions.sampling_rules import MAX_STRUCTURE_CHARS
from tokenizer_service.text.errors import TextError
from tokenizer_service.text.messages import NamedTool, Tool, ToolMode
from tokenizer_service.text.template_data import json_object
from tokenizer_service.text.tool_formats import FORCED_SYNTAX, SYNTAXES, ToolFormat, ToolSyntax
from tokenizer_service.text.tool_parser import StreamingToolParser

# A model that likes to repeat itself would go on to max_tokens, and every call is then run by somebody.
MAX_FORCED_CALLS = 16

_CONSTRAINT_FIELD = "options.sampling.structured_output"
# Keywords of JSON schema whose values are data, and those whose values are schemas by name.
_DATA = frozenset({"const", "default", "enum", "examples"})
_BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How calls are read out of one request's text. `constraint` is set when a call is forced.

    `most_calls`: with the last of them the text ends (a constraint ends by itself).
    """

    names: frozenset[str]
    syntax: ToolSyntax
    constraint: JsonSchema | None
    most_calls: int | None = None

    def new_parser(self, new_id: Callable[[], str]) -> StreamingToolParser:
        """Of one sample."""
        return StreamingToolParser(self.syntax, self.names, new_id, self.most_calls)


def tool_use(prompt: Prompt, sampling: SamplingOptions, tool_format: ToolFormat) -> ToolUse | None:
    """None where no call is read: without tools, with tool_choice none, and in structured output."""
    if not isinstance(prompt, ConversationPrompt) or not prompt.tools or prompt.tool_choice is ToolMode.NONE:
        return None
    names = frozenset(tool.name for tool in prompt.tools)
    if is_forced(prompt):
        return ToolUse(names, FORCED_SYNTAX, tool_constraint(_callable_tools(prompt), _most_calls(prompt)))
    if sampling.structured_output is not None or tool_format is ToolFormat.NONE:
        return None
    return ToolUse(names, SYNTAXES[tool_format], None, None if prompt.parallel_tool_calls else 1)


def is_forced(prompt: ConversationPrompt) -> bool:
    return prompt.tool_choice is ToolMode.REQUIRED or isinstance(prompt.tool_choice, NamedTool)


def forced_call_violations(prompt: ConversationPrompt, sampling: SamplingOptions) -> Iterator[Violation]:
    """What a forced call excludes; the conversation itself is in order."""
    if not is_forced(prompt):
        return
    field = "tool_choice.mode" if prompt.tool_choice is ToolMode.REQUIRED else "tool_choice.name"
    if sampling.structured_output is not None:
        yield Violation(field, "a forced call excludes any other structured output")
    if sampling.ignore_eos:
        yield Violation("options.sampling.ignore_eos", "excludes a forced call, which ends where it is complete")
    try:
        size = len(tool_constraint(_callable_tools(prompt), _most_calls(prompt)).schema)
    except TextError as error:
        yield Violation(error.field or field, error.message)
        return
    if size > MAX_STRUCTURE_CHARS:
        message = (
            f"a schema of all tools has {size:,} characters; at most {MAX_STRUCTURE_CHARS:,} when a call is forced"
        )
        yield Violation("tools", message)


def in_words_of_tools(refusal: Refusal) -> Refusal:
    """The engine's refusal of a constraint that a client did not send, as one of the tools that it did send."""
    if not any(each.field.startswith(_CONSTRAINT_FIELD) for each in refusal.violations):
        return refusal
    violations = tuple(
        Violation("tools", each.description) if each.field.startswith(_CONSTRAINT_FIELD) else each
        for each in refusal.violations
    )
    return invalid(violations)


def tool_constraint(tools: Sequence[Tool], most_calls: int) -> JsonSchema:
    """One to `most_calls` calls of `tools`, as an array.

    Raises TextError on `tools[i].parameters` for what is no JSON object, or nested too deeply.
    """
    schemas = [
        json_object(f"tools[{place}].parameters", tool.parameters or '{"type": "object"}')
        for place, tool in enumerate(tools)
    ]
    moved = [_moved(schema, f"#/$defs/tool{place}") for place, schema in enumerate(schemas)]
    calls = [_call_schema(tool.name, f"#/$defs/tool{place}") for place, tool in enumerate(tools)]
    schema = {
        "$defs": {f"tool{place}": schema for place, schema in enumerate(moved)},
        "type": "array",
        "items": {"anyOf": calls} if len(calls) > 1 else calls[0],
        "minItems": 1,
        "maxItems": most_calls,
    }
    return JsonSchema(json.dumps(schema, ensure_ascii=False))


def _callable_tools(prompt: ConversationPrompt) -> Sequence[Tool]:
    choice = prompt.tool_choice
    return [tool for tool in prompt.tools if not isinstance(choice, NamedTool) or tool.name == choice.name]


def _most_calls(prompt: ConversationPrompt) -> int:
    is_one = isinstance(prompt.tool_choice, NamedTool) or not prompt.parallel_tool_calls
    return 1 if is_one else MAX_FORCED_CALLS


def _call_schema(name: str, arguments: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": {"$ref": arguments}},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(node: Any, place: str, *, is_by_name: bool = False) -> Any:
    """A schema at `place` of another one: its references to itself start there."""
    if isinstance(node, list):
        return [_moved(part, place) for part in node]
    if not isinstance(node, dict):
        return node
    if is_by_name:
        return {name: _moved(part, place) for name, part in node.items()}
    return {key: _moved_value(key, value, place) for key, value in node.items()}


def _moved_value(key: str, value: Any, place: str) -> Any:
    if key == "$ref" and isinstance(value, str) and value.startswith("#"):
        return place + value[1:]
    return value if key in _DATA else _moved(value, place, is_by_name=key in _BY_NAME)
