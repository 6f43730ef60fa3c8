"""Tokens in, visible text out, up to a stop string: detokenizer, stop strings and tool calls of one sample in a row.

Must not know: engines, clients, time, how a model writes its calls.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from tokenizer_service.text.detokenizer import Detokenizer
from tokenizer_service.text.messages import ToolCallDelta
from tokenizer_service.text.stop_strings import StopStrings


class ToolParser(Protocol):
    """Takes the tool calls of one sample out of its text. `most_calls` None: any number is allowed."""

    most_calls: int | None

    @property
    def is_over(self) -> bool:
        """The last call that is allowed is complete: the text ends here."""

    def feed(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """New text in; what of it (and of the text held back) is to be shown, and new parts of calls."""

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        """What is still held back, at the end of the text. Called once."""


class Assembled(NamedTuple):
    """`text` to show, how many of the given tokens it took, the stop string that was found, parts of calls.

    `is_over`: the text ends here, by a stop string or by the last call that is allowed. `tokens_held`: how many of
    the last tokens, of this call and those before, have text that is held back because it may become a stop string.
    """

    text: str
    tokens_used: int
    stop_string: str | None
    tool_calls: tuple[ToolCallDelta, ...] = ()
    is_over: bool = False
    tokens_held: int = 0


class Assembler(Protocol):
    """What a sample needs to make its text."""

    def add(self, token_ids: Sequence[int]) -> Assembled: ...

    def finish(self) -> Assembled: ...


class TextAssembler:
    """Once it is over it takes no more."""

    def __init__(
        self, detokenizer: Detokenizer, stops: StopStrings | None, tool_parser: ToolParser | None = None
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._tool_parser = tool_parser
        self._chars_made = self._chars_shown = 0  # of the text before tool calls are taken out
        self._held_ends: deque[int] = deque()  # where the text of each held token ends

    def add(self, token_ids: Sequence[int]) -> Assembled:
        """The text that these tokens complete. An end in it is the end: nothing is held back then."""
        parser = self._tool_parser
        if parser is None:
            return self._add(token_ids)
        if parser.most_calls is not None:
            return self._add_up_to_call(parser, token_ids)
        made = self._add(token_ids)
        return self._parsed(parser, made, is_last=made.is_over)

    def _add_up_to_call(self, parser: ToolParser, token_ids: Sequence[int]) -> Assembled:
        """One by one, so that the token that completes the last call is known."""
        text, calls = "", tuple[ToolCallDelta, ...]()
        for place, token_id in enumerate(token_ids):
            step = self._add((token_id,))
            made = self._parsed(parser, step, is_last=step.is_over)
            text, calls = text + made.text, calls + made.tool_calls
            if made.is_over:
                return Assembled(text, place + 1, made.stop_string, calls, is_over=True)
        return Assembled(text, len(token_ids), None, calls, tokens_held=len(self._held_ends))

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
            new = self._detokenizer.add((token_id,))
            text, stop = self._stops.feed(new)
            parts.append(text)
            self._count(len(new), len(text))
            if stop is not None:
                return Assembled("".join(parts), place + 1, stop, is_over=True)
        return Assembled("".join(parts), len(token_ids), None, tokens_held=len(self._held_ends))

    def _count(self, chars_made: int, chars_shown: int) -> None:
        """Of the text of one more token, and of what that has set free."""
        self._chars_made += chars_made
        self._chars_shown += chars_shown
        self._held_ends.append(self._chars_made)
        while self._held_ends and self._held_ends[0] <= self._chars_shown:
            self._held_ends.popleft()

    def _finish(self) -> Assembled:
        rest = self._detokenizer.finish()
        if self._stops is None:
            return Assembled(rest, 0, None)
        text, stop = self._stops.feed(rest)
        return Assembled(text if stop else text + self._stops.flush(), 0, stop, is_over=stop is not None)

    def _parsed(self, parser: ToolParser, made: Assembled, *, is_last: bool) -> Assembled:
        text, calls = parser.feed(made.text) if made.text else ("", ())
        if is_last:
            rest, more = parser.finish()
            text, calls = text + rest, calls + more
        is_over = made.is_over or parser.is_over
        return Assembled(text, made.tokens_used, made.stop_string, calls, is_over, 0 if is_over else made.tokens_held)
