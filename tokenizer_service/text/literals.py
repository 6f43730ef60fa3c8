"""Keeps special-token text that a client wrote apart from the special tokens that a chat template wrote.

A message that contains "<|im_end|>" must not end its turn: the characters reach the model as ordinary text.
`mark` puts an invisible character into each such literal before the template is rendered, so that afterwards
an unbroken literal can only be the template's own. `encode` then hides the template's special tokens behind
placeholders, removes the marks, and encodes everything in one call of a tokenizer that knows the placeholders
but no special token.

Must not know: templates, messages, requests.
"""

import json
import re
from collections.abc import Iterable

from tokenizers import AddedToken, Tokenizer

from tokenizer_service.text.errors import TextError
from tokenizer_service.text.tokenizer import TextTokenizer, encode_with

# Noncharacters: valid in a str, never part of text that people exchange.
_MARK = "\ufdd0"
_RENAMED = "\ufdd1"
_FIRST_PLACEHOLDER = 0xFDD2  # one for each combination of the three flags of an added token
_RESERVED = frozenset(chr(code) for code in range(0xFDD0, 0xFDDA))


class LiteralGuard:
    """The guard of one tokenizer; safe for many threads.

    Guarded are the tokens that the tokenizer calls special, except those of a single character, which cannot
    be told from text. The id of the unknown token may still come of text that the tokenizer does not know.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        library = tokenizer.library_copy()
        unknown = tokenizer.named_special_tokens.get("unk_token")
        special = {
            token.content: (token_id, _placeholder(token))
            for token_id, token in library.get_added_tokens_decoder().items()
            if token.special and len(token.content) > 1
        }
        self._special = special
        self._control_ids = frozenset(token_id for text, (token_id, _) in special.items() if text != unknown)
        self._beginnings = frozenset(text[:size] for text in special for size in range(1, len(text)))
        self._longest = max(map(len, special), default=0)
        self._library = self._without_special_tokens(library)
        self._library.add_tokens(_placeholders(special.values(), library))
        self._placeholder_ids = {self._library.token_to_id(placeholder) for _, placeholder in special.values()}

    def mark(self, text: str) -> str:
        """`text` with a mark inside each special-token literal, also one that only later text could complete."""
        return self._mark_tail(self._mark_whole(text))

    def check_markable(self, text: str, field: str) -> None:
        """Raises TextError on `field` if `text`, part of a marked conversation, has the guard's own characters."""
        if not _RESERVED.isdisjoint(text):
            message = "special-token text together with the noncharacters U+FDD0..U+FDD9 is not supported"
            raise TextError(field, message)

    def encode(self, rendered: str, *, is_marked: bool, field: str) -> list[int]:
        """The ids of a rendered prompt. Without marks they are the ordinary ones, as long as those are safe.

        Raises TextError on `field` when the tokenizer cannot keep a literal as ordinary text.
        """
        if not is_marked:
            ids = self._tokenizer.encode_rendered(rendered, field=field)
            if self._has_only_the_templates(ids, rendered):
                return ids
        if is_marked or _RESERVED.isdisjoint(rendered):
            guarded = self._encode_guarded(rendered, field)
            if guarded is not None:
                return guarded
        raise TextError(field, "special-token text in a message cannot be kept as ordinary text by this tokenizer")

    def _without_special_tokens(self, library: Tokenizer) -> Tokenizer:
        """`library`, or a copy, that makes ordinary ids of special-token text."""
        library.encode_special_tokens = True
        special_ids = {token_id for token_id, _ in self._special.values()}
        encoded = (library.encode(literal, add_special_tokens=False).ids for literal in self._special)
        if all(special_ids.isdisjoint(ids) for ids in encoded):
            return library
        renamed = _with_renamed_tokens(library, self._special)
        renamed.encode_special_tokens = True
        return renamed

    def _mark_whole(self, text: str) -> str:
        literals = self._literals_in(text)
        if not literals:
            return text
        # Looking ahead finds overlapping literals too: each loses its unbroken form.
        return re.sub(rf"(?={_alternation(literals)})(.)", rf"\g<1>{_MARK}", text, flags=re.DOTALL)

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
        literals = self._literals_in(rendered)
        found = re.findall(_alternation(literals), rendered) if literals else []
        return [self._special[literal][0] for literal in found]

    def _encode_guarded(self, rendered: str, field: str) -> list[int] | None:
        """None when the tokenizer makes a special token of ordinary text, or loses a placeholder."""
        literals, hidden = self._literals_in(rendered), rendered
        if literals:
            hidden = re.sub(_alternation(literals), lambda match: self._special[match[0]][1], rendered)
        raw = encode_with(self._library, hidden.replace(_MARK, ""), add_special_tokens=False, field=field)
        return self._put_back(raw, self._written_ids(rendered))

    def _put_back(self, raw: list[int], special_ids: list[int]) -> list[int] | None:
        ids: list[int] = []
        left = iter(special_ids)
        for token_id in raw:
            if token_id in self._control_ids:
                return None
            special = next(left, None) if token_id in self._placeholder_ids else token_id
            if special is None:
                return None
            ids.append(special)
        return ids if next(left, None) is None else None

    def _literals_in(self, text: str) -> list[str]:
        return [literal for literal in self._special if literal in text]


def _alternation(literals: list[str]) -> str:
    """A pattern of any of `literals`, the longest first as the tokenizer itself prefers."""
    return "|".join(re.escape(literal) for literal in sorted(literals, key=len, reverse=True))


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


def _with_renamed_tokens(library: Tokenizer, names: Iterable[str]) -> Tokenizer:
    """A copy in which the tokens `names` keep their ids under names that no text contains.

    Some models, such as Unigram, hold special tokens among their pieces and would find them in plain text.
    """
    content = json.loads(library.to_str())
    new_names = {name: _RENAMED + name for name in names}
    model = content["model"]
    vocabulary = model["vocab"]
    if model.get("unk_token") in new_names:
        model["unk_token"] = new_names[model["unk_token"]]
    if isinstance(vocabulary, dict):
        model["vocab"] = {new_names.get(name, name): i for name, i in vocabulary.items()}
    else:
        model["vocab"] = [[new_names.get(name, name), score] for name, score in vocabulary]
    for token in content["added_tokens"]:
        token["content"] = new_names.get(token["content"], token["content"])
    content["post_processor"] = None  # it may name the tokens, and is not asked for anything
    return Tokenizer.from_str(json.dumps(content))
