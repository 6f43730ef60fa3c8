"""The turns of a conversation, and the calls in a new one.

Must not know: templates, tokens, protobuf.
"""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant's turn made; `arguments` is a JSON object, as JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New part of a tool call; the first one of a call (`index` in the turn) has its id and name."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `role` is what the model's template knows: "system", "user", "assistant", "tool", ...

    `tool_call_id` and `name` belong to a tool's turn: the call that it answers, and the tool.
    """

    role: str
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema of its arguments, as JSON (None: any)."""

    name: str
    description: str | None = None
    parameters: str | None = None


class ToolMode(Enum):
    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"  # at least one call


@dataclass(frozen=True, slots=True)
class NamedTool:
    """Exactly this tool is called."""

    name: str


ToolChoice = ToolMode | NamedTool
