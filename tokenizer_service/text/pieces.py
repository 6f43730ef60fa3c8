"""Which bytes of text each token stands for, read once from a tokenizer's decoder.

Must not know: requests, streams, prompts, chat.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

TokenToBytes = Callable[[str], bytes]


@dataclass(frozen=True, slots=True)
class PieceRules:
    """A decoder as "concatenate the tokens' bytes, then read them as UTF-8".

    `first` and `rest` give the bytes of the first token of a text and of any later one. Up to `strip_count`
    characters `strip_char` are then removed from the start of the text. A byte that belongs to no character
    becomes U+FFFD: one for each byte when `each_byte`, otherwise one for each maximal broken part.
    """

    first: TokenToBytes
    rest: TokenToBytes
    strip_char: str = ""
    strip_count: int = 0
    each_byte: bool = False


class PieceTable:
    """Token id -> bytes, filled as ids appear. Shared by all requests; at most one entry per id."""

    def __init__(self, rules: PieceRules, id_to_token: Callable[[int], str | None], vocab_size: int) -> None:
        self.rules = rules
        self._id_to_token = id_to_token
        self._vocab_size = vocab_size
        self._rest: dict[int, bytes | None] = {}

    def rest(self, token_id: int) -> bytes | None:
        """The bytes of a token that is not the first of its text; None for an id that is no token."""
        try:
            return self._rest[token_id]
        except KeyError:
            return self._fill(token_id)

    def first(self, token_id: int) -> bytes | None:
        """The bytes of a token that begins a text; None for an id that is no token."""
        token = self._token(token_id)
        return None if token is None else self.rules.first(token)

    def _fill(self, token_id: int) -> bytes | None:
        token = self._token(token_id)
        if token is None:
            return None  # not remembered: there is no end of such ids
        self._rest[token_id] = self.rules.rest(token)
        return self._rest[token_id]

    def _token(self, token_id: int) -> str | None:
        return self._id_to_token(token_id) if 0 <= token_id < self._vocab_size else None


def piece_rules(decoder_state: bytes | None) -> PieceRules | None:
    """The rules of a decoder given by its JSON state; None when it is of no additive kind.

    Known: ByteLevel; Metaspace; [Replace..., ByteFallback, Fuse, Strip] with any part left out; no decoder at
    all (tokens joined by spaces).
    """
    if decoder_state is None:
        return PieceRules(first=str.encode, rest=lambda token: b" " + token.encode())
    steps = _flatten(json.loads(decoder_state))
    match [step["type"] for step in steps]:
        case ["ByteLevel"]:
            to_bytes = _byte_level()
            return PieceRules(first=to_bytes, rest=to_bytes)
        case ["Metaspace"]:
            return _metaspace(steps[0])
        case _:
            return _replace_and_fuse(steps)


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        return [decoder]
    return [step for part in decoder["decoders"] for step in _flatten(part)]


def _byte_level() -> TokenToBytes:
    """GPT-2's spelling of bytes: printable Latin-1 characters stand for themselves, the rest for U+0100 and
    on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    shifted = [byte for byte in range(256) if byte not in plain]
    byte_of = {chr(byte): byte for byte in plain} | {chr(0x100 + place): byte for place, byte in enumerate(shifted)}

    def to_bytes(token: str) -> bytes:
        try:
            return bytes([byte_of[character] for character in token])
        except KeyError:  # an added token outside this spelling is its own text
            return token.encode()

    return to_bytes


def _metaspace(step: dict[str, Any]) -> PieceRules:
    mark = step["replacement"]
    at_start = " " if step["prepend_scheme"] == "never" else ""
    return PieceRules(
        first=lambda token: token.replace(mark, at_start).encode(),
        rest=lambda token: token.replace(mark, " ").encode(),
    )


def _replace_and_fuse(steps: list[dict[str, Any]]) -> PieceRules | None:
    """The decoders that came from SentencePiece models."""
    kinds = " ".join(step["type"] for step in steps)
    shape = re.fullmatch(r"(Replace ?)*(?P<bytes>ByteFallback ?)?(?P<fuse>Fuse ?)?(?P<strip>(?<=Fuse )Strip)?", kinds)
    replacements = [step for step in steps if step["type"] == "Replace"]
    if not shape or not steps or any("String" not in step["pattern"] for step in replacements):
        return None
    no_strip: dict[str, Any] = {"content": "", "start": 0, "stop": 0}
    strip = steps[-1] if shape["strip"] else no_strip
    if strip["stop"]:
        return None
    pairs = [(step["pattern"]["String"], step["content"]) for step in replacements]
    to_bytes = _replacing(pairs, byte_tokens=bool(shape["bytes"]))
    return PieceRules(to_bytes, to_bytes, strip["content"], strip["start"], each_byte=bool(shape["bytes"]))


def _replacing(pairs: list[tuple[str, str]], *, byte_tokens: bool) -> TokenToBytes:
    def to_bytes(token: str) -> bytes:
        for old, new in pairs:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if byte_tokens else None
        return bytes([int(byte[1], 16)]) if byte else token.encode()

    return to_bytes
