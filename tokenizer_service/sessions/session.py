"""One client's generation: takes the engine's news as they come, keeps the text until the client reads it.

The engine's side never waits for the reader: unread deltas are merged; past a limit the request is cancelled.
Must not know: grpc, protobuf, which engine serves it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from tokenizer_service.engines.messages import EngineFinish, FinishReason, TokenSink, TokenStream, Usage
from tokenizer_service.engines.refusal import Refusal, RefusalCode, deadline_passed
from tokenizer_service.sessions.assembler import TextAssembler
from tokenizer_service.sessions.events import Completed, Failed, TextDelta, TextEvent

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What a reader may leave unread.

    `last_word_timeout_s`: how long to wait for the engine's last word after a stop string, since only the
    engine knows how much of the prompt was cached.
    """

    max_unread_tokens: int = 65_536
    max_unread_chars: int = 1024 * 1024
    last_word_timeout_s: float = 0.25


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What a session needs to know of its request; `deadline` in seconds of the event loop's clock."""

    request_id: str
    prompt_tokens: int
    seed: int
    deadline: float | None
    include_stop: bool
    hidden_stop_reasons: frozenset[int]  # plain end-of-sequence ids: they end, but are no stop reason


class SessionObserver(Protocol):
    """Told about progress, for metrics."""

    def on_tokens(self, num_tokens: int) -> None: ...

    def on_stop_string(self) -> None: ...


class TextSession:
    """A TokenSink for the engine's side; events for the one reader, the last one Completed or Failed.

    The reader must call `close`, which cancels in the engine whatever still runs.
    """

    def __init__(
        self, facts: SessionFacts, assembler: TextAssembler, limits: ReadLimits, observer: SessionObserver
    ) -> None:
        self._facts = facts
        self._assembler = assembler
        self._limits = limits
        self._observer = observer
        self._stream: TokenStream | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._text: list[str] = []
        self._unread_chars = 0
        self._token_ids: list[int] = []
        self._tokens_received = 0
        self._stop_string: str | None = None
        self._end: Completed | Failed | None = None
        self._is_closed = False
        self._news = asyncio.Event()

    @property
    def prompt_tokens(self) -> int:
        return self._facts.prompt_tokens

    def start(self, submit: Callable[[TokenSink], TokenStream | Refusal]) -> Refusal | None:
        """Hands the request to an engine through `submit`; the refusal if it is not taken."""
        stream = submit(self)
        if isinstance(stream, Refusal):
            return stream
        self._stream = stream
        if self._facts.deadline is not None:
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_at(self._facts.deadline, self.fail, deadline_passed()))
        return None

    def on_news(self, token_ids: Sequence[int], finish: EngineFinish | None) -> None:
        if self._end is not None:
            return
        if self._stop_string is not None:
            if finish is not None:
                self._complete_stop(finish.usage.cached_tokens)
            return
        try:
            self._take(token_ids, finish)
        except Exception:
            # This request's failure alone: the loop that calls us serves all the others.
            _log.exception("detokenizing_failed", request_id=self._facts.request_id)
            self.fail(Refusal(RefusalCode.INTERNAL, "the text of the completion could not be made"))
        self._news.set()

    def on_lost(self, refusal: Refusal) -> None:
        if self._stop_string is not None:
            self._complete_stop(0)
        else:
            self.fail(refusal)

    def fail(self, refusal: Refusal) -> None:
        """Ends the session unless it has ended, also in the engine. Unread text stays readable."""
        if self._end is None:
            self._end = Failed(refusal)
            self._release()

    def close(self) -> None:
        """The reader leaves, at any time. Idempotent."""
        self._is_closed = True
        self.fail(Refusal(RefusalCode.CANCELLED, "the request was cancelled"))
        self._release()

    async def next_event(self) -> TextEvent:
        """Waits for news. After Completed or Failed do not call it again."""
        while not (self._text or self._token_ids or self._end):
            self._news.clear()
            await self._news.wait()
        if self._text or self._token_ids:
            delta = TextDelta("".join(self._text), tuple(self._token_ids))
            self._drop_unread()
            return delta
        assert self._end is not None
        return self._end

    def _take(self, token_ids: Sequence[int], finish: EngineFinish | None) -> None:
        before = self._tokens_received
        visible = self._visible(token_ids, finish)
        made = self._assembler.add(visible)
        if made.stop_string is None:
            used = len(token_ids)
            rest = self._assembler.finish() if finish is not None else None
            text = made.text + rest.text if rest else made.text
            stop = rest.stop_string if rest else None
        else:
            used, text, stop = made.tokens_used, made.text, made.stop_string
        self._tokens_received = before + used
        self._keep(text, token_ids[:used])
        if stop is not None:
            self._found_stop(stop, finish)
        elif finish is not None:
            self._finish(finish)
        else:
            self._check_unread()

    def _visible(self, token_ids: Sequence[int], finish: EngineFinish | None) -> Sequence[int]:
        """A stop token is not shown unless asked for."""
        if finish is None or finish.stop_token_id is None or self._facts.include_stop:
            return token_ids
        hides = len(token_ids) > 0 and token_ids[-1] == finish.stop_token_id
        return token_ids[:-1] if hides else token_ids

    def _keep(self, text: str, token_ids: Sequence[int]) -> None:
        if text:
            self._text.append(text)
            self._unread_chars += len(text)
        self._token_ids.extend(token_ids)
        if token_ids:
            self._observer.on_tokens(len(token_ids))

    def _check_unread(self) -> None:
        tokens, chars = len(self._token_ids), self._unread_chars
        if tokens <= self._limits.max_unread_tokens and chars <= self._limits.max_unread_chars:
            return
        self._drop_unread()
        message = f"the reader is too slow: {tokens:,} tokens and {chars:,} characters were left unread"
        self.fail(Refusal(RefusalCode.RESOURCE_EXHAUSTED, message))

    def _drop_unread(self) -> None:
        self._text = []
        self._token_ids = []
        self._unread_chars = 0

    def _found_stop(self, stop: str, finish: EngineFinish | None) -> None:
        self._stop_string = stop
        if finish is not None:
            self._complete_stop(finish.usage.cached_tokens)
            return
        self._observer.on_stop_string()
        if self._stream is not None:
            self._stream.cancel()
        if self._end is None and not self._is_closed:
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(self._limits.last_word_timeout_s, self._complete_stop, 0))

    def _complete_stop(self, cached_tokens: int) -> None:
        if self._end is None:
            usage = Usage(self._facts.prompt_tokens, self._tokens_received, cached_tokens)
            self._end = Completed(FinishReason.STOP, usage, self._stop_string, None, self._facts.seed)
            self._release()

    def _finish(self, finish: EngineFinish) -> None:
        if finish.refusal is not None:
            self.fail(finish.refusal)
            return
        stop_id = None if finish.stop_token_id in self._facts.hidden_stop_reasons else finish.stop_token_id
        self._end = Completed(finish.reason, finish.usage, None, stop_id, self._facts.seed)
        self._release()

    def _release(self) -> None:
        """Nothing more is wanted from the engine; wakes the reader."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._stream is not None:
            self._stream.close()
        self._news.set()
