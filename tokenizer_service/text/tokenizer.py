"""Text to token ids and back, for one model.

Must not know: gRPC, requests, sampling, torch; limits are arguments.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tokenizer_service.text.detokenizer import Detokenizer, PieceDetokenizer, WindowDetokenizer
from tokenizer_service.text.errors import TextError, check_size, check_unicode
from tokenizer_service.text.loading import load_library_tokenizer
from tokenizer_service.text.pieces import PieceTable, piece_rules


class TextTokenizer:
    """The tokenizer of one model. Safe for use by many threads; encoding does not hold the GIL.

    `vocab_size` is the highest token id plus one, added tokens included; the model's own vocabulary may be
    larger (padded), and ids from there have no text. `longest_token_bytes` counts the vocabulary's own
    spelling. `special_tokens` are in the order of their ids.
    """

    def __init__(self, library: Tokenizer, names: Mapping[str, str]) -> None:
        """`library` must not be changed afterwards; `names` are the named special tokens ("eos_token" ->
        "</s>").
        """
        self._library = library
        special = {i: token for i, token in library.get_added_tokens_decoder().items() if token.special}
        vocabulary = library.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self.longest_token_bytes: int = max(map(len, map(str.encode, vocabulary)), default=1)
        self.special_ids: frozenset[int] = frozenset(special)
        self.special_tokens: tuple[str, ...] = tuple(special[i].content for i in sorted(special))
        self.named_special_tokens: Mapping[str, str] = dict(names)
        decoder = library.decoder
        rules = piece_rules(None if decoder is None else decoder.__getstate__())
        self._pieces = PieceTable(rules, library.id_to_token, self.vocab_size) if rules else None

    @classmethod
    def load(cls, folder: Path) -> "TextTokenizer":
        """Reads a model folder (see loading). Raises TextError with field None when it cannot be read."""
        return cls(*load_library_tokenizer(folder))

    @property
    def bos_token(self) -> str | None:
        return self.named_special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.named_special_tokens.get("eos_token")

    def token_id(self, token: str) -> int | None:
        """The id of a token given in the vocabulary's own spelling; None when there is none."""
        token_id: int | None = self._library.token_to_id(token)
        return token_id

    def encode(
        self,
        text: str,
        add_special_tokens: bool,
        *,
        field: str = "text",
        max_chars: int | None = None,
        max_bytes: int | None = None,
    ) -> list[int]:
        """The ids of `text`, in which the literal of a special token means that token (plain prompts may use
        them).

        Raises TextError: on `field` for text over a limit or with a lone surrogate; on None when the
        tokenizer itself fails.
        """
        check_size(field, text, max_chars=max_chars, max_bytes=max_bytes)
        return encode_with(self._library, text, add_special_tokens=add_special_tokens, field=field)

    def encode_rendered(self, text: str, *, field: str = "messages") -> list[int]:
        """The ids of text that a chat template wrote: the template has put BOS and EOS where they belong."""
        return encode_with(self._library, text, add_special_tokens=False, field=field)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool, *, field: str = "token_ids") -> str:
        """The text of a client's ids, exactly what a Detokenizer would stream (see detokenizer).

        Raises TextError for an id outside 0..vocab_size-1.
        """
        for place, token_id in enumerate(token_ids):
            if not 0 <= token_id < self.vocab_size:
                known = f"the vocabulary has the ids 0 to {self.vocab_size - 1}"
                raise TextError(field, f"{field}[{place}] is {token_id}; {known}")
        detokenizer = self.new_detokenizer((), skip_special_tokens)
        return detokenizer.add(token_ids) + detokenizer.finish()

    def new_detokenizer(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool, shown_ids: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """A stream for the completion of a prompt, of which only the two ends are read.

        `shown_ids` are not skipped, though they are special.
        """
        skipped = self.special_ids - shown_ids if skip_special_tokens else frozenset()
        if self._pieces is not None:
            return PieceDetokenizer(self._pieces, skipped, prompt_ids)

        def decode(token_ids: list[int]) -> str:
            text: str = self._library.decode(token_ids, skip_special_tokens=False)
            return text

        return WindowDetokenizer(decode, self.vocab_size, skipped, prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds inside a text; for some only a part of a character.

        A special token is its own text, an id without a token has none. Of the ids of a text they are the
        text's bytes in a row (with the space that some tokenizers put before a text).
        """
        if self._pieces is not None:
            return self._pieces.rest(token_id) or b""
        if not 0 <= token_id < self.vocab_size:
            return b""
        text: str = self._library.decode([token_id], skip_special_tokens=False)
        return text.encode()

    def library_copy(self) -> Tokenizer:
        """A second library tokenizer of the same content, free to be changed."""
        return Tokenizer.from_str(self._library.to_str())


def encode_with(library: Tokenizer, text: str, *, add_special_tokens: bool, field: str) -> list[int]:
    """Token ids by `library`, with its failures as TextError: of `field` for bad Unicode, of None otherwise."""
    try:
        # The batch call releases the GIL; the single one would stop the event loop on a long text.
        encoding: Any = library.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # a panic in the library is no Exception
        check_unicode(field, text)
        raise TextError(None, "the tokenizer failed on this text") from error
    return list(encoding.ids)
