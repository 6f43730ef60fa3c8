"""Reads requests off the wire: bytes that are no valid message are the client's mistake, named by field.

(The library itself answers them with UNKNOWN and the name of a class.) Must not know: what the messages mean.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

MessageT = TypeVar("MessageT", bound=Message)

MAX_FIELDS_READ = 20_000
"""So many fields of a bad message are looked at to name the wrong one: it happens on the event loop."""

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class Malformed:
    """`field` is the path of the first field that is not valid, "" when that cannot be told."""

    field: str
    description: str


def request_parser(kind: type[MessageT]) -> Callable[[bytes], MessageT | Malformed]:
    """A deserializer that never raises on a client's bytes."""

    def parse(data: bytes) -> MessageT | Malformed:
        try:
            return kind.FromString(data)
        except DecodeError:
            return _explain(kind.DESCRIPTOR, data)

    return parse


def _explain(descriptor: Any, data: bytes) -> Malformed:
    try:
        found = _find_bad_text(descriptor, data, "", _Budget(MAX_FIELDS_READ))
    except (IndexError, ValueError):
        found = None
    if found is None:
        return Malformed("", f"the bytes are no valid {descriptor.name}")
    return Malformed(*found)


class _Budget:
    """Counts down the fields that may still be read."""

    def __init__(self, fields: int) -> None:
        self._left = fields

    def spend(self) -> None:
        """Raises ValueError when there is none left."""
        self._left -= 1
        if self._left < 0:
            raise ValueError("too many fields")


def _find_bad_text(descriptor: Any, data: bytes, path: str, budget: _Budget) -> tuple[str, str] | None:
    """The path of the first string field that is not UTF-8. Raises on bytes that are no message at all."""
    place, counts = 0, dict[int, int]()
    while place < len(data):
        budget.spend()
        tag, place = _varint(data, place)
        number, wire_type = tag >> 3, tag & 7
        content, place = _content(data, place, wire_type)
        field = descriptor.fields_by_number.get(number)
        if field is None or wire_type != _BYTES:
            continue
        counts[number] = counts.get(number, 0) + 1
        name = f"{path}{field.name}" + (f"[{counts[number] - 1}]" if field.is_repeated else "")
        found = _check_content(field, content, name, budget)
        if found is not None:
            return found
    return None


def _check_content(field: Any, content: bytes, name: str, budget: _Budget) -> tuple[str, str] | None:
    if field.message_type is not None:
        return _find_bad_text(field.message_type, content, f"{name}.", budget)
    if field.type != FieldDescriptor.TYPE_STRING:
        return None
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return name, f"the text is not valid UTF-8 (byte {error.start:,} is 0x{content[error.start]:02X})"
    return None


def _content(data: bytes, place: int, wire_type: int) -> tuple[bytes, int]:
    """The bytes of a length-delimited field (empty for the other kinds) and where the next field begins."""
    if wire_type == _VARINT:
        return b"", _varint(data, place)[1]
    if wire_type in (_FIXED32, _FIXED64):
        return b"", place + (8 if wire_type == _FIXED64 else 4)
    if wire_type != _BYTES:
        raise ValueError(f"wire type {wire_type}")
    length, place = _varint(data, place)
    if place + length > len(data):
        raise ValueError("truncated")
    return data[place : place + length], place + length


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[place]
        place += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
    raise ValueError("varint")
