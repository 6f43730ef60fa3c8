"""Tools that a model may call, and its calls.

Must not know: grpc, protobuf, conversations.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call: `name` has 1 to 64 letters, digits, "_" or "-".

    `parameters` is the JSON schema of the arguments, as JSON text or as the value that it stands for; None: any
    object.
    """

    name: str
    description: str | None = None
    parameters: str | Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that an assistant's turn makes; `arguments` is a JSON object, as JSON text."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New part of a call; the first one of a call (`index` in the turn) has its id and name."""

    index: int
    id: str | None
    name: str | None
    arguments: str


class ToolMode(Enum):
    """Whether the model calls tools."""

    AUTO = "auto"
    NONE = "none"
    REQUIRED = "required"  # at least one call


@dataclass(frozen=True, slots=True)
class NamedTool:
    """A call of exactly this tool."""

    name: str


ToolChoice = ToolMode | NamedTool
