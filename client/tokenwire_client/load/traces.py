"""Readers of recorded traffic: Azure's CSV, Mooncake's JSON lines, ShareGPT's conversations.

Must not know: when and where requests are sent. Files are read piece by piece and only as far as needed; a mistake is a
TraceError with the line.
"""

import csv
import json
import math
import re
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any, TextIO

from tokenwire_client.load.lengths import MAX_TOKENS
from tokenwire_client.load.workload import CHARACTERS_PER_TOKEN, TRACE_BLOCK_TOKENS, TraceEntry

MAX_ENTRIES = 1_000_000
_MAX_LINE = 4 * 2**20
_MAX_CONVERSATION = 16 * 2**20
_PIECE = 2**20
_BETWEEN = re.compile(r"[\s,\[]*")


class TraceError(ValueError):
    """A trace that cannot be read; the message names file and line."""


class TraceFormat(Enum):
    """Of a recorded file."""

    AZURE = "azure"  # CSV: TIMESTAMP,ContextTokens,GeneratedTokens
    MOONCAKE = "mooncake"  # JSON lines: timestamp (ms), input_length, output_length, hash_ids
    SHAREGPT = "sharegpt"  # JSON: [{"conversations": [{"from": "human", "value": ...}, ...]}, ...]


def read_trace(path: Path, kind: TraceFormat, limit: int = MAX_ENTRIES, seconds: float = math.inf) -> list[TraceEntry]:
    """Up to `limit` entries in order, those that start within `seconds` of the first. TraceError."""
    readers: dict[TraceFormat, Callable[[TextIO], Iterator[TraceEntry]]] = {
        TraceFormat.AZURE: _azure,
        TraceFormat.MOONCAKE: _mooncake,
        TraceFormat.SHAREGPT: _sharegpt,
    }
    entries: list[TraceEntry] = []
    first = 0.0
    try:
        with path.open(encoding="utf-8-sig", newline="" if kind is TraceFormat.AZURE else None) as file:
            for entry in readers[kind](file):
                first = first if entries else entry.at
                if len(entries) >= min(limit, MAX_ENTRIES) or entry.at - first > seconds:
                    break
                entries.append(_moved(entry, first))
    except TraceError as error:
        raise TraceError(f"{path}, {error}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{path} is not UTF-8 text") from None
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror}") from None
    if not entries:
        raise TraceError(f"{path} holds no requests")
    return entries


def _moved(entry: TraceEntry, first: float) -> TraceEntry:
    return TraceEntry(entry.at - first, entry.input_tokens, entry.output_tokens, entry.block_ids, entry.text)


def _azure(file: TextIO) -> Iterator[TraceEntry]:
    wanted = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    reader = csv.DictReader(_lines_of(file))
    last = -math.inf
    try:
        if not set(wanted) <= set(reader.fieldnames or ()):
            raise TraceError(f"line 1: the columns {', '.join(wanted)} are needed")
        for row in reader:
            at = _moment(row["TIMESTAMP"], reader.line_num)
            last = _in_order(at, last, reader.line_num)
            yield TraceEntry(
                at,
                _tokens(row["ContextTokens"], "ContextTokens", reader.line_num),
                _tokens(row["GeneratedTokens"], "GeneratedTokens", reader.line_num),
            )
    except csv.Error as error:
        raise TraceError(f"line {max(1, reader.line_num)}: {error}") from None


def _mooncake(file: TextIO) -> Iterator[TraceEntry]:
    last = -math.inf
    for number, line in enumerate(_lines_of(file), 1):
        if not line.strip():
            continue
        row = _object(line, number)
        last = _in_order(_milliseconds(row.get("timestamp"), number), last, number)
        length = _tokens(row.get("input_length"), "input_length", number)
        yield TraceEntry(
            last,
            length,
            _tokens(row.get("output_length"), "output_length", number),
            _blocks(row.get("hash_ids", []), length, number),
        )


def _sharegpt(file: TextIO) -> Iterator[TraceEntry]:
    """The first human turn of each conversation and the length of its answer; those without both are left out."""
    for number, conversation in _values(file):
        if not isinstance(conversation, dict):
            raise TraceError(f"line {number}: a conversation must be an object")
        turns = conversation.get("conversations", conversation.get("conversation"))
        if not isinstance(turns, list):
            raise TraceError(f"line {number}: `conversations` must be a list")
        texts: list[Any] = [turn.get("value") for turn in turns[:2] if isinstance(turn, dict)]
        roles = [turn.get("from") for turn in turns[:2] if isinstance(turn, dict)]
        if roles in (["human", "gpt"], ["user", "assistant"]) and all(isinstance(t, str) and t.strip() for t in texts):
            yield TraceEntry(0.0, _estimate(texts[0]), _estimate(texts[1]), text=texts[0])


def _estimate(text: str) -> int:
    return min(MAX_TOKENS, math.ceil(len(text) / CHARACTERS_PER_TOKEN))


def _values(file: TextIO) -> Iterator[tuple[int, Any]]:
    """(line, value) of each element of a JSON array, or of each JSON value of a file of lines; piece by piece."""
    decoder = json.JSONDecoder()
    text, at, line, is_array, is_whole = "", 0, 1, False, False
    while True:
        begin = _BETWEEN.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
        is_array |= "[" in text[at:begin]
        line, at = line + text.count("\n", at, begin), begin
        if text.startswith("]", at):
            return
        if is_whole and at == len(text):
            if is_array:
                raise TraceError(f"line {line}: the file ends within its list")
            return
        try:
            value, end = decoder.raw_decode(text, at)
        except json.JSONDecodeError as error:
            if is_whole or len(text) - at > _MAX_CONVERSATION:
                place = line + text.count("\n", at, error.pos)
                raise TraceError(f"line {place}: not JSON ({error.msg})") from None
            # As much again as is left: a long value is tried few times.
            piece = file.read(max(_PIECE, len(text) - at))
            text, at, is_whole = text[at:] + piece, 0, not piece
            continue
        except (ValueError, RecursionError) as error:
            raise TraceError(f"line {line}: not JSON that can be read ({error})") from None
        yield line, value
        line, at = line + text.count("\n", at, end), end


def _lines_of(file: TextIO) -> Iterator[str]:
    number = 0
    while line := file.readline(_MAX_LINE + 1):
        number += 1
        if len(line) > _MAX_LINE:
            raise TraceError(f"line {number}: longer than {_MAX_LINE} characters")
        yield line


def _object(line: str, number: int) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"line {number}: not JSON ({error})") from None
    if not isinstance(row, dict):
        raise TraceError(f"line {number}: must be an object")
    return row


def _moment(text: str | None, line: int) -> float:
    """Seconds of a date and time; without a zone it is UTC."""
    try:
        moment = datetime.fromisoformat(text or "")
    except ValueError:
        raise TraceError(f"line {line}: TIMESTAMP {str(text)[:40]!r} is no date and time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _milliseconds(value: object, line: int) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e15:
        raise TraceError(f"line {line}: timestamp must be milliseconds >= 0")
    return value / 1e3


def _in_order(at: float, last: float, line: int) -> float:
    if at < last:
        raise TraceError(f"line {line}: it is earlier than the line before, by {last - at:.3f} s")
    return at


def _tokens(value: object, name: str, line: int) -> int:
    """At least 1: a recorded answer of no tokens is asked for as one."""
    text = str(value)
    if isinstance(value, bool) or not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > MAX_TOKENS:
        raise TraceError(f"line {line}: {name} must be a whole number from 0 to {MAX_TOKENS}, got {text[:40]!r}")
    return max(1, int(text))


def _blocks(value: object, length: int, line: int) -> tuple[int, ...]:
    if not isinstance(value, list) or any(isinstance(each, bool) or not isinstance(each, int) for each in value):
        raise TraceError(f"line {line}: hash_ids must be a list of integers")
    # What a block does not fill belongs to the request alone; more ids than tokens is a mistake.
    if len(value) > math.ceil(length / TRACE_BLOCK_TOKENS):
        raise TraceError(f"line {line}: {len(value)} hash_ids for {length} tokens (a block has {TRACE_BLOCK_TOKENS})")
    return tuple(value)
