"""Tokens in, visible text out, up to a stop string: detokenizer and stop strings of one request in a row.

Must not know: engines, clients, time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizer_service.text.detokenizer import Detokenizer
from tokenizer_service.text.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class Assembled:
    """`text` to show, how many of the given tokens it took, and the stop string that was found."""

    text: str
    tokens_used: int
    stop_string: str | None


class TextAssembler:
    """After a stop string was found it takes no more."""

    def __init__(self, detokenizer: Detokenizer, stops: StopStrings | None) -> None:
        self._detokenizer = detokenizer
        self._stops = stops

    def add(self, token_ids: Sequence[int]) -> Assembled:
        if self._stops is None:
            return Assembled(self._detokenizer.add(token_ids), len(token_ids), None)
        parts: list[str] = []
        for place, token_id in enumerate(token_ids):
            # One by one, so that the token that completes a match is known.
            text, stop = self._stops.feed(self._detokenizer.add((token_id,)))
            parts.append(text)
            if stop is not None:
                return Assembled("".join(parts), place + 1, stop)
        return Assembled("".join(parts), len(token_ids), None)

    def finish(self) -> Assembled:
        """The text held back so far, at the end of the generation."""
        rest = self._detokenizer.finish()
        if self._stops is None:
            return Assembled(rest, 0, None)
        text, stop = self._stops.feed(rest)
        return Assembled(text if stop else text + self._stops.flush(), 0, stop)
