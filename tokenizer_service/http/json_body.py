"""Reads the JSON body of a request: bounded in size, time and depth; every flaw is a 4xx that says where.

Must not know: what the fields mean.
"""

import asyncio
import json
import math
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from tokenizer_service.http.errors import HttpError

Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
JsonObject: TypeAlias = dict[str, Any]

MAX_DEPTH = 64
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class ClientLeft(Exception):
    """The client has gone: there is nobody to answer."""


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """`timeout_s`: for the whole body."""

    max_bytes: int
    timeout_s: float


async def read_body(headers: Mapping[str, str], receive: Receive, limits: BodyLimits) -> bytes | HttpError:
    """The body of a POST. Raises ClientLeft."""
    refusal = _check_headers(headers, limits.max_bytes)
    if refusal is not None:
        return refusal
    body = bytearray()
    try:
        async with asyncio.timeout(limits.timeout_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientLeft
                body += message.get("body", b"")
                if len(body) > limits.max_bytes:
                    return _too_large(f"more than {limits.max_bytes:,}", limits.max_bytes)
                if not message.get("more_body", False):
                    return bytes(body)
    except TimeoutError:
        text = f"the body did not arrive within {limits.timeout_s:g} seconds"
        return HttpError(408, text, headers={"connection": "close"})


def _check_headers(headers: Mapping[str, str], max_bytes: int) -> HttpError | None:
    kind = headers.get("content-type", "").split(";", 1)[0].strip().lower()
    if kind != "application/json":
        return HttpError(415, f"the content type is {kind[:100] or 'not given'}; application/json is needed")
    if headers.get("content-encoding", "identity").lower() != "identity":
        return HttpError(415, "a compressed body is not supported")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > max_bytes:
        return _too_large(f"{int(length[:20]):,}", max_bytes)
    return None


def _too_large(size: str, max_bytes: int) -> HttpError:
    return HttpError(413, f"the body of {size} bytes exceeds the limit of {max_bytes:,}", code="request_too_large")


def parse_object(data: bytes) -> JsonObject | HttpError:
    """The JSON object in `data`; no duplicate keys, no NaN or Infinity, no lone surrogates, at most MAX_DEPTH deep."""
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return HttpError(400, f"the body is not valid UTF-8 (byte {error.start:,} is 0x{data[error.start]:02X})")
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_refuse_constant,
            parse_float=_finite,
        )
    except json.JSONDecodeError as error:
        return HttpError(400, f"the body is not valid JSON: {error.msg} at character {error.pos:,}")
    except RecursionError:
        return _too_deep()
    except ValueError as error:
        # Python converts no number of more than 4,300 digits, and says so in words about itself.
        reason = "a number has too many digits" if "integer string" in str(error) else error
        return HttpError(400, f"the body is not acceptable JSON: {reason}")
    if not isinstance(value, dict):
        return HttpError(400, "the body is not a JSON object")
    has_surrogates = _SURROGATE.search(text) is not None
    if not has_surrogates and text.count("[") + text.count("{") <= MAX_DEPTH:
        return value  # it cannot be too deep: long lists of numbers are not walked through
    return _check_content(value, has_surrogates=has_surrogates) or value


def _too_deep() -> HttpError:
    return HttpError(400, f"the body is nested more than {MAX_DEPTH} levels deep")


def _object(pairs: list[tuple[str, Any]]) -> JsonObject:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen = set[str]()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"the key {key[:100]!r} is given twice")
            seen.add(key)
    return made


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"the number {text[:40]} is too large")
    return value


def _check_content(value: JsonObject, *, has_surrogates: bool) -> HttpError | None:
    """Level by level, without recursion."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        if has_surrogates and not all(map(_is_unicode, level)):
            return HttpError(400, "the body holds a lone surrogate, which is not valid Unicode text")
        level = [
            child
            for item in level
            for child in (item.values() if type(item) is dict else item)
            if type(child) is dict or type(child) is list
        ]
        if not level:
            return None
    return _too_deep()


def _is_unicode(container: Any) -> bool:
    texts = [*container, *container.values()] if type(container) is dict else container
    try:
        "".join(text for text in texts if type(text) is str).encode()
    except UnicodeEncodeError:
        return False
    return True
