"""From a request's constraint to the library's own grammar text; refuses what is not one.

Runs where it may be killed (see `checker`): converting may be as expensive as what it is given.
Must not know: the vocabulary, requests.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from llguidance import LLMatcher, grammar_from

from engine_service.core.sampling import ConstraintKind, StructuredOutput
from engine_service.grammar.limits import GrammarLimits
from engine_service.grammar.repetition import nested_repeats, nested_repeats_of_grammar

# White space is free, but bounded: a model that likes it would go on for ever.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{0,16}", "lenient": False}
_MAX_DEPTH = 64
_SPECIAL = re.compile(r"[][\\.+*?()|{}^$#&~-]")  # in a regular expression


class BadGrammar(Exception):
    """The client's constraint cannot be used; the message is for the client."""


def grammar_text(constraint: StructuredOutput, limits: GrammarLimits) -> str:
    """What the library compiles. Raises BadGrammar."""
    text = constraint.text
    match constraint.kind:
        case ConstraintKind.JSON_OBJECT:
            return _of_schema({"type": "object"})
        case ConstraintKind.JSON_SCHEMA:
            return _of_schema(_checked_schema(text, limits))
        case ConstraintKind.REGEX:
            _check_repeats(nested_repeats(text), limits)
            return LLMatcher.grammar_from_regex(text)
        case ConstraintKind.GRAMMAR:
            _check_repeats(nested_repeats_of_grammar(text), limits)
            return _of_grammar(text)
        case ConstraintKind.CHOICE:
            values = json.loads(text)
            return LLMatcher.grammar_from_regex("|".join(_SPECIAL.sub(r"\\\g<0>", value) for value in values))


def _of_schema(schema: Any) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)
    except ValueError as error:
        raise BadGrammar(f"not a usable JSON schema: {error}") from None


def _of_grammar(text: str) -> str:
    try:
        return str(grammar_from("grammar", text))
    except (RecursionError, ValueError) as error:
        is_deep = isinstance(error, RecursionError) or isinstance(error.__context__, RecursionError)
        raise BadGrammar("the grammar is nested too deeply" if is_deep else str(error)) from None


def _checked_schema(text: str, limits: GrammarLimits) -> Any:
    try:
        schema = json.loads(text)
    except RecursionError:
        raise BadGrammar(f"the schema is nested deeper than {_MAX_DEPTH} levels") from None
    except json.JSONDecodeError as error:
        raise BadGrammar(f"the schema is not JSON: {error}") from None
    except ValueError:
        raise BadGrammar("a number in the schema has too many digits") from None
    if schema is False:
        raise BadGrammar("the schema `false` allows nothing")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise BadGrammar(f"a JSON schema is an object or a boolean, not {json.dumps(schema)[:40]}")
    for pattern in _patterns(schema):
        _check_repeats(nested_repeats(pattern), limits)
    return schema


def _patterns(schema: Any) -> Iterator[str]:
    """The regular expressions in a schema, wherever they stand. Raises BadGrammar for one that is too deep."""
    level = [schema]
    for _ in range(2 * _MAX_DEPTH):  # a level of a schema is an object in an object
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                yield from (value for key, value in node.items() if key == "pattern" and isinstance(value, str))
                named = node.get("patternProperties")
                yield from named if isinstance(named, dict) else ()
                below += node.values()
            elif isinstance(node, list):
                below += node
        level = below
        if not level:
            return
    raise BadGrammar(f"the schema is nested deeper than {_MAX_DEPTH} levels")


def _check_repeats(count: int, limits: GrammarLimits) -> None:
    if count > limits.max_repeats:
        raise BadGrammar(f"nested repetition multiplies to {count:,}; at most {limits.max_repeats:,} is allowed")
