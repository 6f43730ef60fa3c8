"""Keeps special-token text that a client wrote apart from the special tokens that a chat template wrote.

A message that contains "<|im_end|>" must not end its turn: the characters reach the model as ordinary text.
`mark` puts an invisible character into each such literal before the template is rendered, so that afterwards
an unbroken literal can only be the template's own. `encode` then hides the template's special tokens behind
placeholders, removes the marks, and encodes everything in one call of a tokenizer that knows the placeholders
but no special token.

Must not know: templates, messages, requests.
"""

import re
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer

from tokenizer_service.text.errors import TextError
from tokenizer_service.text.tokenizer import TextTokenizer, encode_with

# Noncharacters: valid in a str, never part of text that people exchange.
_MARK = "\ufdd0"
_BREAK = "\ufdd1"
_FIRST_PLACEHOLDER = 0xFDD2  # one for each combination of the three flags of an added token
_NEVER = "(?!)"  # a pattern without a match
_RESERVED = frozenset(chr(code) for code in range(0xFDD0, 0xFDDA))


class LiteralGuard:
    """The guard of one tokenizer; safe for many threads.

    Guarded are the tokens that the tokenizer calls special, except those of a single character, which cannot
    be told from text, and the unknown token, which ordinary text may produce.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._library = tokenizer.library_copy()
        unknown = tokenizer.named_special_tokens.get("unk_token")
        special = {
            token.content: (token_id, _placeholder(token))
            for token_id, token in self._library.get_added_tokens_decoder().items()
            if token.special and len(token.content) > 1
        }
        self._special = special
        self._control_ids = frozenset(token_id for text, (token_id, _) in special.items() if text != unknown)
        self._beginnings = frozenset(text[:size] for text in special for size in range(1, len(text)))
        self._longest = max(map(len, special), default=0)
        self._library.encode_special_tokens = True
        self._library.add_tokens(
            [
                AddedToken(_BREAK, special=False, normalized=False),
                *_placeholders(special.values(), self._library),
            ]
        )
        self._break_id = self._library.token_to_id(_BREAK)

    def mark(self, text: str, field: str) -> str:
        """`text` with a mark inside each special-token literal, whole or begun at its end (text is joined to
        it later).

        Raises TextError on `field` if that is needed but the text contains the guard's own characters.
        """
        marked = self._mark_tail(self._mark_whole(text))
        if marked != text and not _RESERVED.isdisjoint(text):
            message = "special-token text together with the noncharacters U+FDD0..U+FDD9 is not supported"
            raise TextError(field, message)
        return marked

    def encode(self, rendered: str, *, is_marked: bool, field: str) -> list[int]:
        """The ids of a rendered prompt. Without marks they are the ordinary ones, as long as those are safe.

        Raises TextError on `field` when the tokenizer cannot keep a literal as ordinary text.
        """
        if not is_marked:
            ids = self._tokenizer.encode_rendered(rendered, field=field)
            if self._has_only_the_templates(ids, rendered):
                return ids
        if is_marked or _RESERVED.isdisjoint(rendered):
            for joint in ("", _BREAK):
                guarded = self._encode_guarded(rendered, joint, field)
                if guarded is not None:
                    return guarded
        raise TextError(
            field, "special-token text in a message cannot be kept as ordinary text by this tokenizer"
        )

    def _mark_whole(self, text: str) -> str:
        # Looking ahead finds overlapping literals too: each loses its unbroken form.
        ahead = f"(?={self._pattern_for(text).pattern})(.)"
        return re.sub(ahead, rf"\g<1>{_MARK}", text, flags=re.DOTALL)

    def _mark_tail(self, text: str) -> str:
        """Breaks literals that only what follows could complete, such as a message that ends in "<|im_"."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start:] in self._beginnings:
                return text[: start + 1] + _MARK + self._mark_tail(text[start + 1 :])
        return text

    def _has_only_the_templates(self, ids: list[int], rendered: str) -> bool:
        """Normalizers can make special tokens of text that has no such literal (full-width "＜s＞")."""
        expected = [i for i in self._written_ids(rendered) if i in self._control_ids]
        return [token_id for token_id in ids if token_id in self._control_ids] == expected

    def _written_ids(self, rendered: str) -> list[int]:
        return [self._special[literal][0] for literal in self._pattern_for(rendered).findall(rendered)]

    def _encode_guarded(self, rendered: str, joint: str, field: str) -> list[int] | None:
        """None when the tokenizer makes a special token of ordinary text, or loses a placeholder."""
        pattern = self._pattern_for(rendered)
        hidden = pattern.sub(lambda match: self._special[match[0]][1], rendered).replace(_MARK, joint)
        raw = encode_with(self._library, hidden, add_special_tokens=False, field=field)
        return self._put_back(raw, self._written_ids(rendered))

    def _put_back(self, raw: list[int], special_ids: list[int]) -> list[int] | None:
        ids: list[int] = []
        left = iter(special_ids)
        for token_id in raw:
            if token_id in self._control_ids:
                return None
            if token_id < self._tokenizer.vocab_size:
                ids.append(token_id)
            elif token_id != self._break_id:
                special = next(left, None)
                if special is None:
                    return None
                ids.append(special)
        return ids if next(left, None) is None else None

    def _pattern_for(self, text: str) -> re.Pattern[str]:
        """Finds the literals that `text` holds; the longest first, as the tokenizer itself does."""
        present = sorted((literal for literal in self._special if literal in text), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, present)) or _NEVER)


def _placeholder(token: AddedToken) -> str:
    """The stand-in of a special token; tokens that treat the space around them alike share one."""
    return chr(_FIRST_PLACEHOLDER + token.lstrip + 2 * token.rstrip + 4 * token.single_word)


def _placeholders(special: Iterable[tuple[int, str]], library: Tokenizer) -> list[AddedToken]:
    known = library.get_added_tokens_decoder()
    flags = {placeholder: known[token_id] for token_id, placeholder in special}
    return [
        AddedToken(
            placeholder,
            special=False,
            normalized=False,
            lstrip=token.lstrip,
            rstrip=token.rstrip,
            single_word=token.single_word,
        )
        for placeholder, token in flags.items()
    ]
