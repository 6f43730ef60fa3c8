"""Fills protobuf messages, and says in the service's words which value does not fit.

Must not know: what the messages mean. What protobuf would refuse is refused here, by the path of its field as
the service would name it, before anything is sent.
"""

from collections.abc import Iterable, Mapping, MutableSequence, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtoMessage

from tokenwire_client.errors import invalid

_WANTED: dict[int, str] = {
    FieldDescriptor.TYPE_STRING: "text without lone surrogates",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_DOUBLE: "a number",
    FieldDescriptor.TYPE_INT32: "an integer from -2^31 to 2^31 - 1",
    FieldDescriptor.TYPE_INT64: "an integer from -2^63 to 2^63 - 1",
    FieldDescriptor.TYPE_UINT32: "an integer from 0 to 2^32 - 1",
}

Element = TypeVar("Element")


def put(target: ProtoMessage, name: str, value: object, path: str) -> None:
    """Sets one field, unless the value is None; zero and false are values. Raises InvalidRequest, as all here."""
    if value is None:
        return
    kind = target.DESCRIPTOR.fields_by_name[name].type
    try:
        if not _fits(kind, value):
            raise TypeError(name)
        setattr(target, name, value)
    except (TypeError, ValueError, OverflowError):
        raise invalid(path, f"must be {_WANTED[kind]}, got {shown(value)}") from None


def put_all(target: ProtoMessage, name: str, values: Sequence[object], path: str) -> None:
    """Fills one repeated field; a refused element is named by its index."""
    kind = target.DESCRIPTOR.fields_by_name[name].type
    repeated: MutableSequence[Any] = getattr(target, name)
    for index, value in enumerate(elements(values, path)):
        try:
            if not _fits(kind, value):
                raise TypeError(name)
            repeated.append(value)
        except (TypeError, ValueError, OverflowError):
            wanted = _WANTED[kind]
            raise invalid(f"{path}[{index}]", f"must be {wanted}, got {shown(value)}") from None


def put_map(target: ProtoMessage, name: str, values: Mapping[Any, Any] | None, path: str) -> None:
    """Fills a map of scalars; a refused entry is named by its key."""
    if values is None:
        return
    if not isinstance(values, Mapping):
        raise invalid(path, f"must be a mapping, got {shown(values)}")
    entry: Any = target.DESCRIPTOR.fields_by_name[name].message_type.fields_by_name  # type: ignore[union-attr]
    keys, kinds = entry["key"].type, entry["value"].type
    for key, value in values.items():
        try:
            if not (_fits(keys, key) and _fits(kinds, value)):
                raise TypeError(name)
            getattr(target, name)[key] = value
        except (TypeError, ValueError, OverflowError):
            wanted = f"from {_WANTED[keys]} to {_WANTED[kinds]}"
            raise invalid(path, f"must be {wanted}, got {shown(key)}: {shown(value)}") from None


def _fits(kind: int, value: object) -> bool:
    """Stricter than protobuf, which takes bytes for text, 1 for true and true for 1."""
    if kind == FieldDescriptor.TYPE_STRING:
        return isinstance(value, str)
    return isinstance(value, bool) == (kind == FieldDescriptor.TYPE_BOOL)


def elements(values: Iterable[Element], path: str) -> Iterable[Element]:
    """The values of a list; text and bytes are sequences too, but taken apart they would be a silent error."""
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Iterable):
        raise invalid(path, f"must be a list, got {shown(values)}")
    return values


def shown(value: object) -> str:
    """A value for a message: short, and ASCII only."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
