"""What a completion has to look like: one of five kinds of constraint.

Must not know: grpc, protobuf, the other settings of a request.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """JSON that fits the schema, given as JSON text or as the value that it stands for."""

    schema: str | bool | Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class JsonObject:
    """Any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole completion matches the pattern."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """Text of a grammar, in Lark syntax or in EBNF as llama.cpp writes it (GBNF)."""

    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these strings."""

    values: Sequence[str]


StructuredOutput = JsonSchema | JsonObject | Regex | Grammar | Choice
