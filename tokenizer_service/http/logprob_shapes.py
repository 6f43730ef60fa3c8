"""Log probabilities in the shapes of OpenAI's two APIs and of vLLM's prompt log probabilities.

Must not know: where they come from.
"""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from tokenizer_service.http.facts import compact, written_list
from tokenizer_service.sessions.events import TextLogprob, TextPositionLogprobs

# Objects of so many positions exist at a time while an answer is written.
_POSITIONS_AT_ONCE = 64


def _batches(positions: Iterable[TextPositionLogprobs]) -> Iterator[list[TextPositionLogprobs]]:
    rest = iter(positions)
    while batch := list(islice(rest, _POSITIONS_AT_ONCE)):
        yield batch


def chat_content(positions: Iterable[TextPositionLogprobs]) -> list[dict[str, Any]]:
    """One entry for each token, as in `choices[].logprobs.content`."""
    return [
        {**_chat_token(position.token), "top_logprobs": [_chat_token(item) for item in position.top]}
        for position in positions
        if position.token is not None
    ]


def written_content(positions: Iterable[TextPositionLogprobs]) -> bytes:
    """`choices[].logprobs` of a chat as JSON."""
    parts = (chat_content(batch) for batch in _batches(positions))
    return b'{"content":' + written_list(parts) + b',"refusal":null}'


def _chat_token(item: TextLogprob) -> dict[str, Any]:
    return {"token": token_text(item.token), "logprob": item.logprob, "bytes": list(item.token)}


def token_text(token: bytes) -> str:
    """A part of a character is shown as U+FFFD; `bytes` tells which part."""
    return token.decode(errors="replace")


def prompt_positions(positions: Iterable[TextPositionLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's form: one entry for each prompt token, by token id; None for the first."""
    return [None if position.token is None else _by_id(position) for position in positions]


def written_prompt(positions: Iterable[TextPositionLogprobs]) -> bytes:
    """`prompt_logprobs` as JSON."""
    return written_list(prompt_positions(batch) for batch in _batches(positions))


def _by_id(position: TextPositionLogprobs) -> dict[str, Any]:
    ranked = {item.token_id: (rank + 1, item) for rank, item in enumerate(position.top)}
    if position.token is not None:
        ranked[position.token.token_id] = (position.rank, position.token)
    return {
        str(token_id): {"logprob": item.logprob, "rank": rank, "decoded_token": token_text(item.token)}
        for token_id, (rank, item) in ranked.items()
    }


class CompletionLogprobs:
    """`choices[].logprobs` of one choice of completions.

    `text_offset` counts characters from the start of the choice's text. Only an echoed prompt has a token without
    a log probability, its first; `first_text` is that token's text. The token itself is among `top_logprobs`, whatever
    its rank, as OpenAI has it, and with its own log probability.
    """

    def __init__(self, first_text: str = "") -> None:
        self._first_text = first_text
        self._characters = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, positions: Iterable[TextPositionLogprobs]) -> dict[str, Any]:
        """The object for these tokens, which follow those of the calls before."""
        made: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for position in positions:
            made["text_offset"].append(self._characters)
            self._add(position.token, position.top, made)
        return made

    def written(self, positions: Iterable[TextPositionLogprobs]) -> bytes:
        """As `add`, as JSON."""
        lists: dict[str, list[bytes]] = {}
        for batch in _batches(positions):
            for name, values in self.add(batch).items():
                lists.setdefault(name, []).append(compact(values)[1:-1])
        if not lists:
            return compact(self.add(()))
        members = [b'"' + name.encode() + b'":[' + b",".join(parts) + b"]" for name, parts in lists.items()]
        return b"{" + b",".join(members) + b"}"

    def _add(self, item: TextLogprob | None, top: Sequence[TextLogprob], made: dict[str, Any]) -> None:
        if item is None:
            made["tokens"].append(self._first_text)
            made["token_logprobs"].append(None)
            made["top_logprobs"].append(None)
            self._characters += len(self._first_text)
            return
        key = _key(item.token)
        made["tokens"].append(key)
        made["token_logprobs"].append(item.logprob)
        made["top_logprobs"].append({**_by_key(top), key: item.logprob})
        self._characters += len(self._decoder.decode(item.token))


def _key(token: bytes) -> str:
    """A token's text; of a part of a character its bytes, as OpenAI writes them: all parts would look alike."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _by_key(ranked: Sequence[TextLogprob]) -> dict[str, float]:
    """Of several tokens with the same bytes the most likely."""
    made = dict[str, float]()
    for item in ranked:
        made.setdefault(_key(item.token), item.logprob)
    return made


def first_token_text(prompt: str, positions: Iterable[TextPositionLogprobs]) -> str:
    """What the other tokens leave of the prompt's start ("" for a token that the text does not show)."""
    rest = b"".join(position.token.token for position in positions if position.token is not None)
    return prompt[: max(0, len(prompt) - len(rest.decode(errors="replace")))]
