"""One client's generation: takes the engine's news as they come, keeps the text until the client reads it.

The engine's side never waits for the reader: unread deltas are merged; past a limit the request is cancelled.
Must not know: grpc, protobuf, which engine serves it.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from tokenizer_service.engines.messages import (
    FinishReason,
    StageTimes,
    TokenNews,
    TokenSink,
    TokenStream,
    Usage,
    sample_seed,
)
from tokenizer_service.engines.refusal import Refusal, RefusalCode, deadline_passed
from tokenizer_service.sessions.assembler import Assembler
from tokenizer_service.sessions.events import Completed, Failed, TextEvent
from tokenizer_service.sessions.sample import Backlog, Sample, TokenBytes

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """What a reader may leave unread, all samples together; a reported alternative of a token counts as one.

    `last_word_timeout_s`: how long to wait for the engine's last word after a stop string, since only the
    engine knows how much of the prompt was cached.
    """

    max_unread_tokens: int = 65_536
    max_unread_chars: int = 1024 * 1024
    last_word_timeout_s: float = 0.25


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """What a session needs to know of its request; `deadline` in seconds of the event loop's clock.

    `seed` is that of the first sample. `reword`: says a refusal of the engine's as the client must read it, where
    the request was changed before the engine got it.
    """

    request_id: str
    prompt_tokens: int
    seed: int
    deadline: float | None
    include_stop: bool
    hidden_stop_reasons: frozenset[int]  # plain end-of-sequence ids: they end, but are no stop reason
    reword: Callable[[Refusal], Refusal] | None = None
    trace_fields: Mapping[str, str] = field(default_factory=dict)  # for log lines


class SessionObserver(Protocol):
    """Told about progress, for metrics and traces."""

    def on_tokens(self, num_tokens: int, index: int) -> None:
        """New tokens of the sample `index`."""

    def on_stop_string(self) -> None: ...

    def on_generated(self) -> None:
        """All samples have ended; what is left is to be read."""


class TextSession:
    """A TokenSink for the engine's side; events for the one reader.

    The events are the deltas of all samples, each with its `index`, and one Completed after the last delta of
    each sample; or, from some point on, one Failed for all. The reader must call `close`, which cancels in the
    engine whatever still runs.
    """

    def __init__(
        self,
        facts: SessionFacts,
        assemblers: Sequence[Assembler],
        limits: ReadLimits,
        observer: SessionObserver,
        token_bytes: TokenBytes,
    ) -> None:
        """One of `assemblers` for each sample."""
        self._facts = facts
        self._backlog = Backlog()
        self._samples = [
            Sample(index, assembler, self._backlog, include_stop=facts.include_stop)
            for index, assembler in enumerate(assemblers)
        ]
        self._num_running = len(self._samples)
        self._limits = limits
        self._observer = observer
        self._token_bytes = token_bytes
        self._stream: TokenStream | None = None
        self._engines: tuple[str, ...] = ()  # once it is closed
        self._timers: list[asyncio.TimerHandle] = []
        self._readable: dict[int, None] = {}  # samples with something to read, in the order of its arrival
        self._failure: Failed | None = None
        self._is_closed = False
        self._news = asyncio.Event()
        self.stages: StageTimes | None = None
        """Of the sample that ended last, as far as its engine told."""

    @property
    def prompt_tokens(self) -> int:
        return self._facts.prompt_tokens

    @property
    def engines(self) -> tuple[str, ...]:
        """Addresses of those that have had it, in order."""
        return self._engines if self._stream is None else self._stream.engines

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    @property
    def replicas(self) -> tuple[str, ...]:
        """Addresses of the engines that have it now."""
        return () if self._stream is None else self._stream.replicas()

    @property
    def is_over(self) -> bool:
        """Nothing new comes from an engine; there may be something to read."""
        return self._is_over

    @property
    def _is_over(self) -> bool:
        return self._num_running == 0 or self._failure is not None

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

    def on_news(self, news: TokenNews) -> None:
        sample = self._samples[news.index]
        if news.finish is not None:
            self.stages = news.finish.stages or self.stages
        if self._failure is not None or sample.end is not None:
            return
        if sample.is_cut:
            if news.finish is not None:
                self._complete_stop(sample, news.finish.usage.cached_tokens)
            return
        try:
            self._take(sample, news)
        except Exception:
            # This request's failure alone: the loop that calls us serves all the others.
            _log.exception("detokenizing_failed", request_id=self._facts.request_id, **self._facts.trace_fields)
            self.fail(Refusal(RefusalCode.INTERNAL, "the text of the completion could not be made"))
        self._news.set()

    def on_lost(self, refusal: Refusal) -> None:
        for sample in self._samples:
            if sample.is_cut:
                self._complete_stop(sample, 0)
        self.fail(refusal)

    def fail(self, refusal: Refusal) -> None:
        """Ends the session unless it has ended, also in the engine. Unread text stays readable."""
        if not self._is_over:
            self._failure = Failed(refusal)
            self._release()

    def close(self) -> None:
        """The reader leaves, at any time. Idempotent."""
        self._is_closed = True
        self.fail(Refusal(RefusalCode.CANCELLED, "the request was cancelled"))
        self._release()
        if self._stream is not None:
            # Each knows the other: what the two hold would stay until the garbage collector comes by.
            self._engines, self._stream = self._stream.engines, None

    async def next_event(self) -> TextEvent:
        """Waits for news. After Failed, or one Completed of each sample, do not call it again."""
        while True:
            event = self._unread_event() if self._readable else None
            event = event or self._failure
            if event is not None:
                return event
            self._news.clear()
            await self._news.wait()

    def _unread_event(self) -> TextEvent | None:
        """The news of the sample that has waited longest, or its end after them."""
        index = next(iter(self._readable))
        sample = self._samples[index]
        if not sample.has_unread():
            del self._readable[index]
            return sample.end
        delta = sample.read(self._token_bytes)
        if sample.end is None and not sample.has_unread():
            del self._readable[index]
        return delta

    def _take(self, sample: Sample, news: TokenNews) -> None:
        used = sample.take(news)
        if used:
            self._observer.on_tokens(used, sample.index)
        if sample.has_unread():
            self._readable[sample.index] = None
        if sample.is_cut:
            self._cut(sample, news)
        elif news.finish is not None:
            self._finish(sample, news)
        else:
            self._check_unread()

    def _check_unread(self) -> None:
        tokens, chars = self._backlog.tokens, self._backlog.chars
        if tokens <= self._limits.max_unread_tokens and chars <= self._limits.max_unread_chars:
            return
        # What is unread will never be read, and so is no end after it.
        self._readable.clear()
        message = f"the reader is too slow: {tokens:,} tokens and {chars:,} characters were left unread"
        self.fail(Refusal(RefusalCode.RESOURCE_EXHAUSTED, message))

    def _cut(self, sample: Sample, news: TokenNews) -> None:
        if news.finish is not None:
            self._complete_stop(sample, news.finish.usage.cached_tokens)
            return
        if sample.stop_string is not None:
            self._observer.on_stop_string()
        if self._stream is not None:
            self._stream.cancel(sample.index)
        if sample.end is None and not self._is_closed:
            loop = asyncio.get_running_loop()
            self._timers.append(loop.call_later(self._limits.last_word_timeout_s, self._complete_stop, sample, 0))

    def _complete_stop(self, sample: Sample, cached_tokens: int) -> None:
        usage = Usage(self._facts.prompt_tokens, sample.tokens_received, cached_tokens)
        self._complete(sample, FinishReason.STOP, usage, None)

    def _finish(self, sample: Sample, news: TokenNews) -> None:
        finish = news.finish
        assert finish is not None
        if finish.refusal is not None:
            reword = self._facts.reword
            self.fail(finish.refusal if reword is None else reword(finish.refusal))
            return
        stop_id = None if finish.stop_token_id in self._facts.hidden_stop_reasons else finish.stop_token_id
        self._complete(sample, finish.reason, finish.usage, stop_id)

    def _complete(self, sample: Sample, reason: FinishReason, usage: Usage, stop_id: int | None) -> None:
        """Ends a sample, unless it or all have ended."""
        if self._is_over or sample.end is not None:
            return
        index = sample.index
        seed = sample_seed(self._facts.seed, index)
        sample.end = Completed(reason, usage, sample.stop_string, stop_id, seed, index, sample.has_tool_calls)
        self._readable[index] = None
        self._num_running -= 1
        if self._num_running == 0:
            self._observer.on_generated()
            self._release()
        self._news.set()

    def _release(self) -> None:
        """Nothing more is wanted from the engine; wakes the reader."""
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        if self._stream is not None:
            self._stream.close()
        self._news.set()
