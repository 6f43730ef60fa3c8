"""One sample of a request: makes its text, keeps what the reader has not read of it, knows how it ended.

Must not know: the other samples, the engine, time.
"""

from collections.abc import Callable, Iterable, Sequence

from tokenizer_service.engines.messages import EngineFinish, PositionLogprobs, TokenNews
from tokenizer_service.sessions.assembler import TextAssembler
from tokenizer_service.sessions.events import (
    Completed,
    TextDelta,
    TextLogprob,
    TextPositionLogprobs,
    ToolCallDelta,
)

TokenBytes = Callable[[int], bytes]

# A long prompt's log probabilities are handed out in parts, so that no reader holds up the others.
PROMPT_POSITIONS_PER_DELTA = 256
# What an id and a name may add to the arguments of a call.
_CALL_OVERHEAD_CHARS = 64


class Sample:
    """`unread_tokens` counts tokens and their reported alternatives. `end` is set by the session."""

    __slots__ = (
        "_assembler",
        "_include_stop",
        "_logprobs",
        "_prompt_logprobs",
        "_text",
        "_token_ids",
        "_tool_calls",
        "end",
        "has_tool_calls",
        "index",
        "stop_string",
        "tokens_received",
        "unread_chars",
        "unread_tokens",
    )

    def __init__(self, index: int, assembler: TextAssembler, *, include_stop: bool) -> None:
        self.index = index
        self.end: Completed | None = None
        self.stop_string: str | None = None
        self.has_tool_calls = False
        self.tokens_received = 0
        self._assembler = assembler
        self._include_stop = include_stop
        self._prompt_logprobs: list[PositionLogprobs] = []
        self.drop_unread()

    def has_unread(self) -> bool:
        return bool(self._token_ids or self._text or self._tool_calls or self._prompt_logprobs)

    def take(self, news: TokenNews) -> int:
        """Takes tokens up to a stop string, which it keeps in `stop_string`; returns how many."""
        token_ids, finish = news.token_ids, news.finish
        made = self._assembler.add(self._visible(token_ids, finish))
        text, calls, stop = made.text, made.tool_calls, made.stop_string
        used = len(token_ids) if stop is None else made.tokens_used
        if stop is None and finish is not None:
            rest = self._assembler.finish()
            text, calls, stop = text + rest.text, calls + rest.tool_calls, rest.stop_string
        self.stop_string = stop
        self.tokens_received += used
        self._keep(text, token_ids if used == len(token_ids) else token_ids[:used])
        if news.logprobs or news.prompt_logprobs:
            self._keep_logprobs(news.logprobs[:used], news.prompt_logprobs)
        if calls:
            self._keep_calls(calls)
        return used

    def _visible(self, token_ids: Sequence[int], finish: EngineFinish | None) -> Sequence[int]:
        """A stop token is not shown unless asked for."""
        if finish is None or finish.stop_token_id is None or self._include_stop:
            return token_ids
        hides = len(token_ids) > 0 and token_ids[-1] == finish.stop_token_id
        return token_ids[:-1] if hides else token_ids

    def _keep(self, text: str, token_ids: Sequence[int]) -> None:
        if text:
            self._text.append(text)
            self.unread_chars += len(text)
        self._token_ids.extend(token_ids)
        self.unread_tokens += len(token_ids)

    def _keep_logprobs(self, logprobs: Iterable[PositionLogprobs], prompt: Iterable[PositionLogprobs]) -> None:
        """The prompt's do not count as unread: the model's context bounds them."""
        for position in logprobs:
            self._logprobs.append(position)
            self.unread_tokens += len(position.top)
        self._prompt_logprobs.extend(prompt)

    def _keep_calls(self, calls: Iterable[ToolCallDelta]) -> None:
        self.has_tool_calls = True
        for call in calls:
            self._tool_calls.append(call)
            self.unread_chars += len(call.arguments) + _CALL_OVERHEAD_CHARS

    def read(self, token_bytes: TokenBytes) -> TextDelta:
        """What is unread; of many prompt positions only the first, and the rest next time."""
        if self._prompt_logprobs:
            prompt = with_text(self._prompt_logprobs[:PROMPT_POSITIONS_PER_DELTA], token_bytes)
            del self._prompt_logprobs[:PROMPT_POSITIONS_PER_DELTA]
            return TextDelta("", (), self.index, (), prompt)
        delta = TextDelta(
            "".join(self._text),
            tuple(self._token_ids),
            self.index,
            with_text(self._logprobs, token_bytes) if self._logprobs else (),
            (),
            tuple(self._tool_calls),
        )
        self.drop_unread()
        return delta

    def drop_unread(self) -> None:
        """Forgets what was not read, but for the prompt's log probabilities."""
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._tool_calls: list[ToolCallDelta] = []
        self.unread_tokens = 0
        self.unread_chars = 0


def with_text(positions: Iterable[PositionLogprobs], token_bytes: TokenBytes) -> tuple[TextPositionLogprobs, ...]:
    """Log probabilities with the bytes of their tokens."""

    def named(pair: tuple[int, float]) -> TextLogprob:
        return TextLogprob(pair[0], token_bytes(pair[0]), pair[1])

    return tuple(
        TextPositionLogprobs(None if token is None else named(token), rank, tuple([named(pair) for pair in top]))
        for token, rank, top in positions
    )
