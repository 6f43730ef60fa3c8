"""Tools and tool calls as OpenAI's chat API writes them.

Must not know: templates, how a model writes a call.
"""

import json
from typing import Any, Literal

from tokenizer_service.http.fields import Fields
from tokenizer_service.text.messages import NamedTool, Tool, ToolCall, ToolChoice, ToolMode


class FunctionFields(Fields):
    """`strict` changes nothing: arguments follow the schema wherever the call is forced."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolFields(Fields):
    type: Literal["function"]
    function: FunctionFields

    def as_tool(self) -> Tool:
        return make_tool(self.function)


class FunctionName(Fields):
    name: str


class NamedChoice(Fields):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(Fields):
    name: str
    arguments: str


class ToolCallFields(Fields):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_call(self) -> ToolCall:
        return ToolCall(self.id, self.function.name, self.function.arguments)


ModeName = Literal["auto", "none", "required"]


def make_tool(function: FunctionFields) -> Tool:
    schema = None if function.parameters is None else json.dumps(function.parameters, ensure_ascii=False)
    return Tool(function.name, function.description, schema)


def make_choice(choice: ModeName | NamedChoice | None) -> ToolChoice | None:
    if choice is None:
        return None
    return NamedTool(choice.function.name) if isinstance(choice, NamedChoice) else ToolMode(choice)
