"""The bounded JSON reader: what json.loads reads, it reads the same; every flaw is a 4xx in words."""

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer_service.http.errors import HttpError
from tokenizer_service.http.json_body import MAX_DEPTH, BodyLimits, ClientLeft, parse_object, read_body

JSON = {"content-type": "application/json; charset=utf-8"}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES, max_size=5), st.booleans())
@settings(max_examples=200, deadline=None)
def test_whatever_json_writes_is_read_back(value: dict[str, Any], ascii_only: bool) -> None:
    assert parse_object(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


@given(st.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_no_bytes_raise(data: bytes) -> None:
    answer = parse_object(data)
    assert isinstance(answer, dict) or answer.status == 400


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"a": 1, "a": 2}', "the key 'a' is given twice"),
        (b'{"x": {"b": 1, "c": 0, "b": 2}}', "the key 'b' is given twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "a number has too many digits"),
        (b'{"a": "\xff"}', "not valid UTF-8 (byte 7 is 0xFF)"),
        (b'{"a": "\\ud800"}', "lone surrogate"),
        (b'{"\\udfff": 1}', "lone surrogate"),
        (b'{"a": [["\\uDC00"]]}', "lone surrogate"),
        (b"[1]", "not a JSON object"),
        (b'"text"', "not a JSON object"),
        (b"", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", f"more than {MAX_DEPTH} levels"),
        (b'{"a": ' + b"[" * 200_000, "levels deep"),
        (b'{"a":' * 100_000, "levels deep"),
    ],
)
def test_a_flaw_is_named(data: bytes, words: str) -> None:
    answer = parse_object(data)
    assert isinstance(answer, HttpError)
    assert answer.status == 400
    assert words in answer.message
    assert len(answer.message) < 300


def test_surrogate_pairs_and_nul_are_text() -> None:
    assert parse_object(rb'{"a": "\ud83c\udf36 \u0000"}') == {"a": "\U0001f336 \0"}


def test_the_deepest_that_is_allowed() -> None:
    depth = MAX_DEPTH - 1
    assert not isinstance(parse_object(b'{"a": ' + b"[" * depth + b"]" * depth + b"}"), HttpError)


async def read(parts: Sequence[bytes], headers: dict[str, str], max_bytes: int = 10) -> bytes | HttpError:
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    queue = iter(messages)

    async def receive() -> dict[str, Any]:
        return next(queue)

    return await read_body(headers, receive, BodyLimits(max_bytes, 1.0))


async def test_a_body_in_parts() -> None:
    assert await read([b"abc", b"", b"defg"], JSON) == b"abcdefg"


@pytest.mark.parametrize("headers", [{}, {"content-type": "text/plain"}, {**JSON, "content-encoding": "gzip"}])
async def test_another_kind_of_content_is_415(headers: dict[str, str]) -> None:
    answer = await read([b"{}"], headers)
    assert isinstance(answer, HttpError)
    assert answer.status == 415


@pytest.mark.parametrize(("parts", "headers"), [([b"x" * 6, b"y" * 6], JSON), ([], {**JSON, "content-length": "11"})])
async def test_a_body_over_the_limit_is_413(parts: list[bytes], headers: dict[str, str]) -> None:
    answer = await read(parts, headers)
    assert isinstance(answer, HttpError)
    assert (answer.status, "10" in answer.message) == (413, True)


async def test_a_body_that_does_not_come_is_408() -> None:
    async def receive() -> dict[str, Any]:
        return await asyncio.get_running_loop().create_future()

    answer = await read_body(JSON, receive, BodyLimits(10, 0.01))
    assert isinstance(answer, HttpError)
    assert answer.status == 408


async def test_a_client_that_leaves_in_its_body() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientLeft):
        await read_body(JSON, receive, BodyLimits(10, 1.0))
