"""From the wire to the engine: what a completion has to look like.

Sizes are checked here; whether a schema or a grammar can be compiled is found out where it is.
Must not know: other fields of a request, grammars.
"""

import json
from collections.abc import Sequence

from engine_service.api.invalid import Invalid
from engine_service.core.sampling import ConstraintKind, StructuredOutput
from tokenwire.common.v1 import sampling_pb2

MAX_CHARACTERS = 65_536
MAX_CHOICES = 1024
_FIELD = "sampling.structured_output"
_TEXTS = {
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "grammar": ConstraintKind.GRAMMAR,
}


def parse_structured_output(message: sampling_pb2.SamplingParams) -> StructuredOutput | None:
    """None when the request has no constraint. Raises Invalid."""
    if not message.HasField("structured_output"):
        return None
    structured = message.structured_output
    if message.ignore_eos:
        raise Invalid(
            "sampling.ignore_eos",
            "ignore_eos and structured_output exclude each other: it ends where the text is complete",
        )
    match structured.WhichOneof("constraint"):
        case "json_object":
            return _json_object(structured.json_object)
        case "choice":
            return StructuredOutput(ConstraintKind.CHOICE, _choices(structured.choice.values))
        case "json_schema" | "regex" | "grammar" as name:
            return StructuredOutput(_TEXTS[name], _text(name, getattr(structured, name)))
        case _:
            raise Invalid(_FIELD, f"structured_output holds no constraint: set one of {', '.join(_names())}")


def _names() -> list[str]:
    return [kind.value for kind in ConstraintKind]


def _json_object(value: bool) -> StructuredOutput:
    if not value:
        raise Invalid(_FIELD, "json_object is false: leave it out, or set it to true")
    return StructuredOutput(ConstraintKind.JSON_OBJECT, "")


def _text(name: str, text: str) -> str:
    if not text.strip():
        raise Invalid(_FIELD, f"{name} is empty")
    _check_size(name, len(text))
    return text


def _choices(values: Sequence[str]) -> str:
    if not 1 <= len(values) <= MAX_CHOICES:
        raise Invalid(_FIELD, f"choice has {len(values):,} values; 1 to {MAX_CHOICES:,} are allowed")
    for place, value in enumerate(values):
        if not value:
            raise Invalid(_FIELD, f"value {place} of choice is empty")
    _check_size("choice", sum(map(len, values)))
    return json.dumps(list(values), ensure_ascii=False)


def _check_size(name: str, characters: int) -> None:
    if characters > MAX_CHARACTERS:
        raise Invalid(_FIELD, f"{name} has {characters:,} characters; at most {MAX_CHARACTERS:,} are allowed")
