"""The requests that one engine has from us, and the commands that are on their way to it.

Demultiplexes step messages to the sinks. Must not know: how the engine is reached, other engines.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from service_runtime.tracing import trace_id_of
from tokenizer_service.engines.attempt_trace import CANCELLED, begin_attempt, end_attempt
from tokenizer_service.engines.convert import cancel_message, engine_finish, submit_message, with_logprobs
from tokenizer_service.engines.handle_stream import HandleStream
from tokenizer_service.engines.live_request import LiveRequest
from tokenizer_service.engines.messages import (
    EngineFinish,
    ModelInfo,
    ReplicaStream,
    TokenNews,
    TokenSink,
    TokenSubmission,
)
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.engines.replica_load import ReplicaLoad
from tokenwire.engine.v1 import engine_pb2

_log = structlog.get_logger()
_CANCELLED = Refusal(RefusalCode.CANCELLED, "the request was cancelled before it started")
_NOT_WRITTEN = Refusal(RefusalCode.INTERNAL, "the request could not be sent to the engine")


@dataclass(slots=True)
class RequestTable:
    """Handles are never used again. `max_queued`: submits that may wait to be written.

    `judge` is told how each sample ended, `on_forgotten` that a request is no longer live.
    """

    address: str
    max_queued: int
    judge: Callable[[EngineFinish], None]
    on_forgotten: Callable[[], None]
    load: ReplicaLoad = field(default_factory=ReplicaLoad)
    outstanding_tokens: int = 0
    next_handle: int = 1
    live: dict[int, LiveRequest] = field(default_factory=dict)
    submits: OrderedDict[int, TokenSubmission] = field(default_factory=OrderedDict)
    cancels: OrderedDict[tuple[int, int | None], None] = field(default_factory=OrderedDict)
    has_commands: asyncio.Event = field(default_factory=asyncio.Event)

    def add(
        self, submission: TokenSubmission, sink: TokenSink, model: ModelInfo, cached_tokens: int
    ) -> ReplicaStream | Refusal:
        """Takes a generation on, unless too much is unsent. `cached_tokens`: see `EngineConnection.submit`."""
        if len(self.submits) >= self.max_queued:
            return Refusal(
                RefusalCode.RESOURCE_EXHAUSTED,
                f"{len(self.submits):,} requests wait to be sent to the engine",
                retry_after_s=1.0,
            )
        handle = self.next_handle
        self.next_handle += 1
        prompt = len(submission.token_ids)
        room = max(0, model.max_model_len - prompt)
        limit, samples = submission.sampling.max_tokens, submission.sampling.num_samples
        work = [room if limit is None else min(limit, room)] * samples
        span = begin_attempt(submission, self.address)
        live = LiveRequest(sink, prompt, work, set(range(samples)), submission.sampling.has_logprobs, span)
        self.live[handle] = live
        self.outstanding_tokens += live.work()
        known = prompt + len(submission.resumed_token_ids)
        self.load.sent(handle, max(0, known - cached_tokens), samples)
        self.submits[handle] = submission
        self.has_commands.set()
        return HandleStream(self, handle, samples, model)

    def next_commands(self, now: float) -> list[engine_pb2.SessionRequest]:
        """What to write next: a cancel and a submit, neither behind many of the other. `now` as in their deadlines."""
        commands = []
        if self.cancels:
            commands.append(cancel_message(*self.cancels.popitem(last=False)[0]))
        while self.submits:
            message = self._submit_message(*self.submits.popitem(last=False), now)
            if message is not None:
                commands.append(message)
                break
        return commands

    def _submit_message(self, handle: int, submission: TokenSubmission, now: float) -> engine_pb2.SessionRequest | None:
        """None when none can be made of it, which is this request's failure alone."""
        try:
            return submit_message(handle, submission, now, self.live[handle].span.context)
        except Exception as error:
            _log.error(
                "submit_failed",
                engine=self.address,
                request_id=submission.request_id,
                error=type(error).__name__,
                **trace_id_of(submission.span),
            )
            self._end_unsent(handle, _NOT_WRITTEN)
            return None

    def _end_unsent(self, handle: int, refusal: Refusal) -> None:
        """The engine never hears of it."""
        live = self.live[handle]
        self._forget(handle)
        live.sink.on_lost(refusal)

    def dispatch(self, step: engine_pb2.StepOutputs) -> bool:
        """News to their sinks. Whether there were any new tokens."""
        has_tokens = False
        for output in step.outputs:
            handle, index = output.handle, output.index
            live = self.live.get(handle)
            if live is None or index not in live.unfinished:
                continue  # closed on our side; the engine did not know yet
            token_ids = output.token_ids[:]  # read from here on: a list is much cheaper than the message's own
            if token_ids:
                has_tokens = True
                if live.prompt_work:
                    self.load.began(handle)
                self.outstanding_tokens -= live.progress(index, len(token_ids))
            finish = None
            if output.HasField("finish"):
                finish = engine_finish(output.finish)
                self.judge(finish)
                self.outstanding_tokens -= live.finish(index)
                self.load.sample_ended(finish.usage)
                if not live.unfinished:
                    end_attempt(live.span, finish.refusal, finish.usage)
                    self._forget(handle)
            news = TokenNews(index, token_ids, finish, (), (), output.cached_tokens)
            live.sink.on_news(with_logprobs(news, output) if live.has_logprobs else news)
        return has_tokens

    def cancel(self, handle: int, index: int | None) -> None:
        """Asks the engine to end a live request, or one sample of it; one that was not sent yet never is."""
        live = self.live.get(handle)
        if live is None or (index is not None and index not in live.unfinished):
            return
        if self.submits.pop(handle, None) is not None:
            self._end_unsent(handle, _CANCELLED)
            return
        self.cancels[handle, index] = None
        self.has_commands.set()

    def forget(self, handle: int) -> None:
        live = self.live.get(handle)
        if live is not None:
            end_attempt(live.span, CANCELLED)
            self._forget(handle)

    def _forget(self, handle: int) -> None:
        live = self.live.pop(handle)
        self.outstanding_tokens -= live.work()
        self.load.forget(handle, len(live.unfinished))
        self.on_forgotten()

    def lose_all(self, loss: Refusal) -> None:
        """The engine has none of them any more: every sink is told."""
        self.load.lost()
        self.submits.clear()
        while self.live:  # a sink that is told may give up others of its own
            handle, live = next(iter(self.live.items()))
            end_attempt(live.span, loss)
            self._forget(handle)
            live.sink.on_lost(loss)
        self.cancels.clear()
