"""The ways to ask for structured output (OpenAI's and vLLM's), and the one constraint that they mean.

Must not know: how a constraint is enforced.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import Field

from tokenizer_service.engines.messages import Choice, Grammar, JsonSchema, Regex, StructuredOutput
from tokenizer_service.engines.messages import JsonObject as AnyObject
from tokenizer_service.http.errors import HttpError, bad_field
from tokenizer_service.http.fields import Fields

SchemaFields = dict[str, Any] | str | bool


class NamedSchema(Fields):
    """`name`, `description` and `strict` change nothing: the schema is always obeyed."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextFormat(Fields):
    type: Literal["text"]


class JsonObjectFormat(Fields):
    type: Literal["json_object"]


class JsonSchemaFormat(Fields):
    type: Literal["json_schema"]
    json_schema: NamedSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Fields):
    """vLLM's object: exactly one of them."""

    json_: SchemaFields | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class StructuredFields(Fields):
    """At most one of these is set."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: SchemaFields | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


def schema_text(schema: SchemaFields) -> str:
    """A schema as JSON; one that comes as a string is JSON already. The order of keys is kept."""
    return schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)


def structured_output(fields: StructuredFields) -> tuple[str, StructuredOutput | None] | HttpError:
    """The client's name of the field, and the constraint."""
    found = [*_of_response_format(fields.response_format), *_of_object(fields.structured_outputs), *_of_guided(fields)]
    if len(found) > 1:
        return bad_field(found[1][0], f"is set beside {found[0][0]}; only one may be")
    if fields.structured_outputs is not None and not any(name.startswith("structured") for name, _ in found):
        return bad_field("structured_outputs", "one of json, regex, choice, grammar and json_object is needed")
    return found[0] if found else ("response_format", None)


def _of_response_format(given: ResponseFormat | None) -> list[tuple[str, StructuredOutput | None]]:
    match given:
        case JsonObjectFormat():
            return [("response_format", AnyObject())]
        case JsonSchemaFormat(json_schema=named):
            schema = {} if named.schema_ is None else named.schema_
            return [("response_format.json_schema.schema", JsonSchema(schema_text(schema)))]
    return []


def _of_object(given: StructuredOutputs | None) -> list[tuple[str, StructuredOutput | None]]:
    if given is None:
        return []
    found = _constraints("structured_outputs.", given.json_, given.regex, given.choice, given.grammar)
    return [*found, ("structured_outputs.json_object", AnyObject())] if given.json_object else found


def _of_guided(fields: StructuredFields) -> list[tuple[str, StructuredOutput | None]]:
    return _constraints("guided_", fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar)


def _constraints(
    prefix: str, schema: SchemaFields | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> list[tuple[str, StructuredOutput | None]]:
    found: list[tuple[str, StructuredOutput | None]] = []
    if schema is not None:
        found.append((f"{prefix}json", JsonSchema(schema_text(schema))))
    if regex is not None:
        found.append((f"{prefix}regex", Regex(regex)))
    if choice is not None:
        found.append((f"{prefix}choice", Choice(tuple(choice))))
    if grammar is not None:
        found.append((f"{prefix}grammar", Grammar(grammar)))
    return found
