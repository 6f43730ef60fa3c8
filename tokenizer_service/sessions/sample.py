"""One sample of a request: makes its text, keeps what the reader has not read of it, knows how it ended.

Must not know: the other samples, the engine, time.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tokenizer_service.engines.messages import EngineFinish, PositionLogprobs, TokenNews
from tokenizer_service.sessions.assembler import Assembler
from tokenizer_service.sessions.events import (
    Completed,
    TextDelta,
    TextLogprob,
    TextPositionLogprobs,
    ToolCallDelta,
)

TokenBytes = Callable[[int], bytes]

# A long prompt's log probabilities are handed out in parts, so that no reader holds up the others.
PROMPT_POSITIONS_PER_DELTA = 32
# What an id and a name may add to the arguments of a call.
_CALL_OVERHEAD_CHARS = 64


@dataclass(slots=True)
class Backlog:
    """What the reader has not read of all samples: tokens and their reported alternatives, and characters."""

    tokens: int = 0
    chars: int = 0


class Sample:
    """Counts what is unread in a backlog that the samples of a request share. `end` is set by the session.

    `is_cut`: its text has ended before the engine said so, by a stop string or the last call that is allowed.
    """

    __slots__ = (
        "_assembler",
        "_backlog",
        "_include_stop",
        "_logprobs",
        "_prompt_logprobs",
        "_prompt_read",
        "_text",
        "_token_ids",
        "_tokens_held",
        "_tool_calls",
        "end",
        "has_tool_calls",
        "index",
        "is_cut",
        "stop_string",
        "tokens_received",
    )

    def __init__(self, index: int, assembler: Assembler, backlog: Backlog, *, include_stop: bool) -> None:
        self.index = index
        self.end: Completed | None = None
        self.is_cut = False
        self.stop_string: str | None = None
        self.has_tool_calls = False
        self.tokens_received = 0
        self._assembler = assembler
        self._backlog = backlog
        self._include_stop = include_stop
        self._tokens_held = 0  # the last ones: they are shown together with their text
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._prompt_logprobs: Sequence[PositionLogprobs] = ()
        self._prompt_read = 0
        self._tool_calls: list[ToolCallDelta] = []

    def has_unread(self) -> bool:
        return (
            len(self._token_ids) > self._tokens_held
            or bool(self._text or self._tool_calls)
            or self._has_unread_prompt()
        )

    def _has_unread_prompt(self) -> bool:
        return self._prompt_read < len(self._prompt_logprobs)

    def take(self, news: TokenNews) -> int:
        """Takes tokens up to the end of the text (see `is_cut`); returns how many."""
        _, token_ids, finish, logprobs, prompt_logprobs, _ = news
        visible = token_ids if finish is None else self._visible(token_ids, finish)
        text, used, stop, calls, is_over, held = self._assembler.add(visible)
        if is_over:
            token_ids = token_ids[:used]
        else:
            used = len(token_ids)
            if finish is not None:
                rest = self._assembler.finish()
                text, stop, calls, is_over = text + rest.text, rest.stop_string, calls + rest.tool_calls, rest.is_over
                held = 0
        self.stop_string, self.is_cut = stop, is_over
        self.tokens_received += used
        self._tokens_held = held
        self._token_ids.extend(token_ids)
        self._backlog.tokens += used
        if text:
            self._text.append(text)
            self._backlog.chars += len(text)
        if logprobs or prompt_logprobs:
            self._keep_logprobs(logprobs[:used], prompt_logprobs)
        if calls:
            self._keep_calls(calls)
        return used

    def _visible(self, token_ids: Sequence[int], finish: EngineFinish) -> Sequence[int]:
        """A stop token is not shown unless asked for."""
        if finish.stop_token_id is None or self._include_stop:
            return token_ids
        hides = len(token_ids) > 0 and token_ids[-1] == finish.stop_token_id
        return token_ids[:-1] if hides else token_ids

    def _keep_logprobs(self, logprobs: Sequence[PositionLogprobs], prompt: Sequence[PositionLogprobs]) -> None:
        """The prompt's come once and do not count as unread: the model's context bounds them."""
        self._logprobs.extend(logprobs)
        self._backlog.tokens += _alternatives(logprobs)
        if prompt:
            self._prompt_logprobs = prompt

    def _keep_calls(self, calls: Sequence[ToolCallDelta]) -> None:
        self.has_tool_calls = True
        self._tool_calls.extend(calls)
        self._backlog.chars += _call_chars(calls)

    def read(self, token_bytes: TokenBytes) -> TextDelta:
        """What is unread; of many prompt positions only the first, and the rest next time."""
        if self._has_unread_prompt():
            return TextDelta("", (), self.index, (), self._read_prompt(token_bytes))
        text, shown = "".join(self._text), len(self._token_ids) - self._tokens_held
        token_ids = tuple(self._token_ids[:shown])
        self._text.clear()
        del self._token_ids[:shown]
        self._backlog.tokens -= len(token_ids)
        self._backlog.chars -= len(text)
        if not self._logprobs and not self._tool_calls:
            return TextDelta(text, token_ids, self.index)
        return TextDelta(text, token_ids, self.index, self._read_logprobs(token_bytes), (), self._read_calls())

    def _read_prompt(self, token_bytes: TokenBytes) -> tuple[TextPositionLogprobs, ...]:
        part = self._prompt_logprobs[self._prompt_read : self._prompt_read + PROMPT_POSITIONS_PER_DELTA]
        self._prompt_read += len(part)
        return with_text(part, token_bytes)

    def _read_logprobs(self, token_bytes: TokenBytes) -> tuple[TextPositionLogprobs, ...]:
        shown = len(self._logprobs) - self._tokens_held
        logprobs, self._logprobs = self._logprobs[:shown], self._logprobs[shown:]
        self._backlog.tokens -= _alternatives(logprobs)
        return with_text(logprobs, token_bytes)

    def _read_calls(self) -> tuple[ToolCallDelta, ...]:
        calls, self._tool_calls = self._tool_calls, []
        self._backlog.chars -= _call_chars(calls)
        return tuple(calls)


def _alternatives(logprobs: Iterable[PositionLogprobs]) -> int:
    return sum(len(position.top) for position in logprobs)


def _call_chars(calls: Iterable[ToolCallDelta]) -> int:
    return sum(len(call.arguments) + _CALL_OVERHEAD_CHARS for call in calls)


def with_text(positions: Iterable[PositionLogprobs], token_bytes: TokenBytes) -> tuple[TextPositionLogprobs, ...]:
    """Log probabilities with the bytes of their tokens."""

    def named(pair: tuple[int, float]) -> TextLogprob:
        return TextLogprob(pair[0], token_bytes(pair[0]), pair[1])

    return tuple(
        TextPositionLogprobs(None if token is None else named(token), rank, tuple([named(pair) for pair in top]))
        for token, rank, top in positions
    )
