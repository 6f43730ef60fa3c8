"""Base of the request types: strict, and every flaw named by the client's own path of the field.

Must not know: which fields there are.
"""

from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tokenizer_service.http.errors import HttpError
from tokenizer_service.http.json_body import JsonObject

Int64 = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
_MAX_SHOWN = 60
_WORDS = {
    "extra_forbidden": "is not a field of this request",
    "missing": "is required",
    "model_type": "must be an object",
    "dict_type": "must be an object",
    "list_type": "must be a list",
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "int_type": "must be an integer",
    "float_type": "must be a number",
}


class Fields(BaseModel):
    """Unknown fields, and values of another JSON type, are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


FieldsT = TypeVar("FieldsT", bound=Fields)


def read_fields(kind: type[FieldsT], value: JsonObject) -> FieldsT | HttpError:
    """An explicit null at the top is a field that is not set."""
    given = {name: content for name, content in value.items() if content is not None}
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        return _explain(error.errors(include_url=False), given)


def _explain(flaws: Sequence[Any], value: JsonObject) -> HttpError:
    """The flaw that lies deepest: of a value that may be of several types it is the nearest to what was meant.

    A wrong kind explains whatever else is wrong with the value.
    """
    found = [(_path(flaw, value), flaw) for flaw in flaws]
    first = found[0][0].split(".")[0].split("[")[0]
    of_first = [(path, flaw) for path, flaw in found if path.split(".")[0].split("[")[0] == first]
    kinds = [path for path, flaw in of_first if flaw["type"] in ("literal_error", "union_tag_invalid")]
    path = kinds[0] if kinds else max((path for path, _ in of_first), key=len)
    texts = dict.fromkeys(_text(flaw) for at, flaw in of_first if at == path)
    return HttpError(400, f"{path or 'body'}: {' or '.join(texts)}", path or None)


def _path(flaw: Any, value: Any) -> str:
    """pydantic's location without the names of types among it, which are no part of the value."""
    path = ""
    for part in flaw["loc"]:
        if isinstance(part, int) and isinstance(value, list) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
        elif isinstance(value, dict) and part in value:
            path, value = _join(path, str(part)), value[part]
        elif flaw["type"] == "missing" and part == flaw["loc"][-1]:
            path = _join(path, str(part))
    return path


def _join(path: str, name: str) -> str:
    return f"{path}.{name[:_MAX_SHOWN]}" if path else name[:_MAX_SHOWN]


def _text(flaw: Any) -> str:
    kind = flaw["type"]
    if kind in _WORDS:
        return _WORDS[kind]
    context = flaw.get("ctx", {})
    if kind == "union_tag_invalid":
        return f"{str(context['tag'])[:_MAX_SHOWN]!r} is not supported; it may be {context['expected_tags']}"
    if kind == "union_tag_not_found":
        return f"{context['discriminator']} is required"
    if kind == "value_error":
        return str(context["error"])
    text = str(flaw["msg"][:1].lower() + flaw["msg"][1:])
    given = flaw["input"]
    shown = f" (got {str(given)[:_MAX_SHOWN]!r})" if isinstance(given, str | int | float) else ""
    return text.replace("input should", "should") + shown
