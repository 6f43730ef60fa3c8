"""Tokens in, visible text out, up to a stop string: detokenizer, stop strings and tool calls of one sample in a row.

Must not know: engines, clients, time, how a model writes its calls.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tokenizer_service.text.detokenizer import Detokenizer
from tokenizer_service.text.messages import ToolCallDelta
from tokenizer_service.text.stop_strings import StopStrings


class ToolParser(Protocol):
    """Takes the tool calls of one sample out of its text."""

    def feed(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """New text in; what of it (and of the text held back) is to be shown, and new parts of calls."""

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """What is still held back, at the end of the text. Called once."""


class Assembled(NamedTuple):
    """`text` to show, how many of the given tokens it took, the stop string that was found, parts of calls."""

    text: str
    tokens_used: int
    stop_string: str | None
    tool_calls: tuple[ToolCallDelta, ...] = ()


class TextAssembler:
    """After a stop string was found it takes no more."""

    def __init__(
        self, detokenizer: Detokenizer, stops: StopStrings | None, tool_parser: ToolParser | None = None
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._tool_parser = tool_parser

    def add(self, token_ids: Sequence[int]) -> Assembled:
        """The text that these tokens complete. A match in it is the end: nothing is held back then."""
        if self._tool_parser is None:
            return self._add(token_ids)
        made = self._add(token_ids)
        return self._parsed(self._tool_parser, made, is_last=made.stop_string is not None)

    def finish(self) -> Assembled:
        """The text held back so far, at the end of the generation."""
        made = self._finish()
        return made if self._tool_parser is None else self._parsed(self._tool_parser, made, is_last=True)

    def _add(self, token_ids: Sequence[int]) -> Assembled:
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

    def _finish(self) -> Assembled:
        rest = self._detokenizer.finish()
        if self._stops is None:
            return Assembled(rest, 0, None)
        text, stop = self._stops.feed(rest)
        return Assembled(text if stop else text + self._stops.flush(), 0, stop)

    def _parsed(self, parser: ToolParser, made: Assembled, *, is_last: bool) -> Assembled:
        text, calls = parser.feed(made.text) if made.text else ("", ())
        if is_last:
            rest, more = parser.finish()
            text, calls = text + rest, calls + more
        return Assembled(text, made.tokens_used, made.stop_string, calls)
