"""Token ids in, whole characters out, one request at a time.

Must not know: stop strings, special-token names, the engine, other requests.

The text of a completion. Let U(ids) be the text of all `ids` (special tokens left out if asked for): their
bytes in a row, read as UTF-8, a byte that belongs to no character read as U+FFFD; no clean-up of spaces is
ever applied. A detokenizer that is given the prompt P and then the ids A emits, over all `add` calls and
`finish`, what U(P + A) has beyond the characters that P alone completes. So the result depends on neither the
split into calls nor the moment: the first token of a completion keeps its space, and a character begun by the
prompt's last bytes belongs to the completion. Without a prompt it is U(A), which is also what
`TextTokenizer.decode` gives.

U is the library's own `decode` with one deliberate exception: in a run of byte-fallback tokens with a broken
byte the library turns the whole run into U+FFFD, valid characters too, however far back. A stream cannot take
characters back, so here (and in `decode`) valid ones stay, and each broken byte is one U+FFFD, as in
SentencePiece.

A byte is held back only while it may still become part of a character, that is for at most 3 bytes; text is
never re-read, so the cost is linear, and memory is those bytes. A character belongs to the token that brings
its last byte.
"""

import codecs
from collections.abc import Callable, Iterable, Sequence, Set
from itertools import islice
from typing import Protocol

from tokenizer_service.text.pieces import PieceTable

_REPLACEMENT = "\ufffd"
_LONGEST_UNFINISHED = 3  # bytes of a 4-byte character that lacks its last byte


class Detokenizer(Protocol):
    """The text of one request; used by one thread at a time."""

    def add(self, token_ids: Iterable[int]) -> str:
        """The characters that these ids complete, possibly none. An unknown id has no text. Never raises."""

    def finish(self) -> str:
        """What is still held back: U+FFFD for the bytes of a character that never came. Call it once."""


class CharacterAssembler:
    """Bytes in, characters out: UTF-8 read piece by piece, the broken parts as U+FFFD."""

    def __init__(self, *, each_byte: bool) -> None:
        self._each_byte = each_byte
        self._pending = b""

    def add(self, piece: bytes, *, final: bool = False) -> str:
        """The characters complete after `piece`. With `final`, nothing is held back."""
        data = self._pending + piece
        parts: list[str] = []
        while True:
            try:
                text, used = codecs.utf_8_decode(data, "strict", final)
            except UnicodeDecodeError as error:
                broken = error.end - error.start if self._each_byte else 1
                parts += data[: error.start].decode(), _REPLACEMENT * broken
                data = data[error.end :]
                continue
            self._pending = data[used:]
            return "".join(parts) + text


class PieceDetokenizer:
    """The Detokenizer of every tokenizer whose tokens are pieces of a byte string (see PieceRules)."""

    def __init__(self, table: PieceTable, skipped_ids: Set[int], prompt_ids: Sequence[int]) -> None:
        self._table = table
        self._skipped = skipped_ids
        self._assembler = CharacterAssembler(each_byte=table.rules.each_byte)
        self._is_first = True
        self._strip_left = table.rules.strip_count
        self._read_prompt(prompt_ids)

    def add(self, token_ids: Iterable[int]) -> str:
        return "".join([self._add_one(token_id) for token_id in token_ids])

    def finish(self) -> str:
        return self._assembler.add(b"", final=True)

    def _add_one(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        piece = self._table.first(token_id) if self._is_first else self._table.rest(token_id)
        if piece is None:
            return ""
        self._is_first = False
        text = self._assembler.add(piece)
        return self._strip(text) if self._strip_left and text else text

    def _strip(self, text: str) -> str:
        kept = text
        while self._strip_left and kept.startswith(self._table.rules.strip_char):
            kept = kept[1:]
            self._strip_left -= 1
        if kept:
            self._strip_left = 0
        return kept

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Takes the state that the whole prompt would leave, from the prompt's two ends alone."""
        read = 0
        while read < len(prompt_ids) and (self._is_first or self._strip_left):
            self._add_one(prompt_ids[read])
            read += 1
        # Bytes left over from the front do no harm: the tail is long enough to end any character.
        self.add(prompt_ids[max(read, self._tail_start(prompt_ids)) :])

    def _tail_start(self, prompt_ids: Sequence[int]) -> int:
        """From where the last bytes of the prompt can be read: an unfinished character lies within."""
        start, size = len(prompt_ids), 0
        while start and size < _LONGEST_UNFINISHED:
            start -= 1
            if prompt_ids[start] not in self._skipped:
                size += len(self._table.rest(prompt_ids[start]) or b"")
        return start


class WindowDetokenizer:
    """The Detokenizer of the other tokenizers: the library decodes a few tokens, after a few earlier ones.

    Ids are taken one by one, so the result does not depend on the split into calls. It equals the library's
    text of all ids when a token's text depends on at most `_CONTEXT` tokens before it. Text that ends in
    U+FFFD is held back for `_LOOKAHEAD` tokens at most. A decoder that rewrites its own past loses its
    context, never the request.
    """

    _CONTEXT = 4
    _LOOKAHEAD = 4

    def __init__(
        self,
        decode: Callable[[list[int]], str],
        vocab_size: int,
        skipped_ids: Set[int],
        prompt_ids: Sequence[int],
    ) -> None:
        """`decode` gives the text of ids of the vocabulary, special tokens included."""
        self._decode = decode
        self._vocab_size = vocab_size
        self._skipped = skipped_ids
        self._context = list(islice(filter(self._has_text, reversed(prompt_ids)), self._CONTEXT))[::-1]
        self._pending: list[int] = []

    def add(self, token_ids: Iterable[int]) -> str:
        return "".join([self._add_one(token_id) for token_id in filter(self._has_text, token_ids)])

    def finish(self) -> str:
        text = self._pending_text()
        self._pending = []
        return text

    def _has_text(self, token_id: int) -> bool:
        return 0 <= token_id < self._vocab_size and token_id not in self._skipped

    def _add_one(self, token_id: int) -> str:
        self._pending.append(token_id)
        text = self._pending_text()
        broken = text.endswith(_REPLACEMENT)
        if broken and len(self._pending) < self._LOOKAHEAD:
            return ""
        # Bytes given up as broken must not spoil the next character.
        self._context = [] if broken else (self._context + self._pending)[-self._CONTEXT :]
        self._pending = []
        return text

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        if text.startswith(before):
            return text[len(before) :]
        self._context = []
        return self._decode(self._pending)
