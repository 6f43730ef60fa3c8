"""The internal handle both RPC styles sit on: submit, cancel, abort by name, news, and the engine's death.

Must not know: protobuf, gRPC calls, how the engine runs.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from engine_service.api.adapter_calls import AdapterCalls
from engine_service.api.engine_metrics import EngineMetrics
from engine_service.api.kv_feed import CommandSink, KvFeed
from engine_service.api.live_request import LiveRequest, Submission, Wake
from engine_service.api.parse import EngineRequest
from engine_service.api.pulse import Pulse
from engine_service.api.request_log import RequestLog
from engine_service.api.request_trace import UNTRACED_REQUEST, RequestTrace
from engine_service.api.step_dumps import StepDumps
from engine_service.core.admission import EngineLimits
from engine_service.core.outcome import Finish, FinishReason, Refusal, RefusalCode, RequestNews
from engine_service.core.stats import EngineStats
from engine_service.loop.messages import (
    Abort,
    AdapterNews,
    AdapterState,
    EngineInfo,
    EngineReady,
    RequestTiming,
    StepReport,
    Submit,
)
from service_runtime.slow_requests import SlowRequests, never_slow

STARTING = Refusal(RefusalCode.ENGINE_GONE, "the engine is starting", retry_after_s=1.0)
SHUTTING_DOWN = Refusal(RefusalCode.SHUTTING_DOWN, "the engine service is shutting down")
_MAILBOX_FULL = Refusal(RefusalCode.QUEUE_FULL, "the engine takes no more requests now", retry_after_s=1.0)
_ABORTED = Refusal(RefusalCode.CANCELLED, "aborted by request id")


@dataclass(slots=True)
class Connection:
    """One life of the engine process. `ended` is set when it is over; then `reason` says why."""

    info: EngineInfo
    limits: EngineLimits
    commands: CommandSink
    stats: EngineStats
    last_step: float | None = None
    adapters: tuple[AdapterState, ...] = ()
    step_seconds: float = 0.0  # of all steps
    reason: Refusal = STARTING
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class EngineHandle:
    """Owns the table of live requests, one for each sample. Lives on the event loop; nothing here waits for the
    engine."""

    def __init__(
        self,
        *,
        metrics: EngineMetrics,
        clock: Callable[[], float],
        max_unread_tokens: int,
        slow: SlowRequests | None = None,
    ) -> None:
        self._metrics = metrics
        self._log = RequestLog(slow or never_slow())
        self._clock = clock
        self._max_unread_tokens = max_unread_tokens
        self._next_id = 1
        self._live: dict[int, LiveRequest] = {}
        self._by_name: dict[str, Submission] = {}
        self._connection: Connection | None = None
        self._launched: float | None = None
        self.pulse = Pulse(clock)
        self.draining = asyncio.Event()
        self.kv_feed = KvFeed()
        self.step_dumps = StepDumps()
        self.adapter_calls = AdapterCalls()
        # Called at each report of the engine, after its figures have been taken over.
        self.report_listeners: list[Callable[[], None]] = []
        # Called when there are other adapters.
        self.adapter_listeners: list[Callable[[], None]] = []
        self._idle = asyncio.Event()
        self._idle.set()

    def connection(self) -> Connection | Refusal:
        """The running engine, or why there is none."""
        if self.is_draining:
            return SHUTTING_DOWN
        return self._connection or STARTING

    @property
    def current(self) -> Connection | None:
        """The running engine even while the service drains."""
        return self._connection

    @property
    def is_draining(self) -> bool:
        return self.draining.is_set()

    @property
    def num_live(self) -> int:
        return len(self._live)

    def submit(
        self, request: EngineRequest, wake: Wake, trace: RequestTrace = UNTRACED_REQUEST
    ) -> Submission | Refusal:
        """Hands a request to the engine. News comes to its samples; `wake` says when, and to which one."""
        connection = self.connection()
        if isinstance(connection, Refusal):
            return connection
        if request.name in self._by_name:
            return Refusal(RefusalCode.DUPLICATE, "a live request has the same request_id", "request.request_id")
        command = Submit(
            self._next_id,
            request.token_ids,
            request.sampling,
            request.timeout_s,
            request.cache_salt,
            request.samples,
            request.priority,
            request.resumed,
            request.tenant,
            request.weight,
            request.name,
            request.adapter,
            request.adapter_fingerprint,
        )
        if not connection.commands.send(command):
            return _MAILBOX_FULL
        submission = Submission(
            request.name,
            self._next_id,
            request.samples,
            request.sampling,
            prompt_tokens=len(request.token_ids),
            resumed_tokens=len(request.resumed),
            started=self._clock(),
            max_unread_tokens=self._max_unread_tokens,
            wake=wake,
            trace=trace,
        )
        self._next_id += request.samples
        if not self._live:
            self.pulse.became_busy()
        self._live.update((live.request_id, live) for live in submission.samples)
        self._by_name[submission.name] = submission
        self._idle.clear()
        return submission

    def cancel(self, samples: Iterable[LiveRequest], cause: Refusal) -> None:
        """Ends samples: no more tokens for their reader, blocks free within one step. Idempotent."""
        running = [live for live in samples if live.request_id in self._live and not live.is_cut]
        for live in running:
            live.cut()
        if running and self._connection is not None:
            command = Abort(tuple(live.request_id for live in running), cause)
            self._connection.commands.send(command, always=True)

    async def abort(self, names: Sequence[str]) -> None:
        """Ends requests by name and returns once the engine has let go of them. Unknown names are fine."""
        found = [submission for name in names if (submission := self._by_name.get(name)) is not None]
        for submission in found:
            self.cancel(submission.samples, _ABORTED)
        for submission in found:
            await submission.done.wait()

    def cancel_all(self, cause: Refusal) -> None:
        self.cancel(list(self._live.values()), cause)

    def launching(self) -> None:
        """An engine process starts now."""
        self._launched = self._clock()

    def attach(self, ready: EngineReady, commands: CommandSink) -> None:
        """A started engine: requests are accepted from now on."""
        info = ready.info
        limits = EngineLimits(
            info.vocab_size,
            info.max_model_len,
            frozenset(info.eos_token_ids),
            info.block_size,
            info.num_blocks,
        )
        self._connection = Connection(info, limits, commands, ready.stats, adapters=ready.adapters.adapters)
        self.pulse.began()
        self._metrics.engine_started(ready, None if self._launched is None else self._clock() - self._launched)

    def detach(self, reason: Refusal) -> None:
        """The engine is gone: every live request ends with `reason`, now."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        for live in list(self._live.values()):
            tokens = live.submission.prompt_tokens, live.num_received
            self._deliver(
                live, RequestNews(live.request_id, (), Finish(FinishReason.ERROR, *tokens, 0, error=reason)), None
            )
        self.step_dumps.engine_gone()
        self.adapter_calls.engine_gone(reason)
        self._metrics.engine_ended()
        connection.reason = reason
        connection.ended.set()

    def drain(self) -> None:
        """Refuses new requests from now on; running ones go on."""
        self.draining.set()

    async def wait_idle(self) -> None:
        """Returns when no request is live."""
        await self._idle.wait()

    def on_report(self, report: StepReport) -> None:
        """Distributes the news of a step."""
        connection = self._connection
        if connection is None:
            return
        connection.stats = report.stats
        if report.steps:
            connection.last_step = self._clock()
            connection.step_seconds += sum([step.seconds for step in report.steps])
        self.pulse.reported(bool(report.steps))
        if report.kv_events:
            self.kv_feed.tell(report.kv_events)
        if report.dump:
            self.step_dumps.tell(report.dump)
        if report.adapters is not None:
            self._take_adapters(connection, report.adapters)
        timings = {timing.request_id: timing for timing in report.finished}
        for item in report.news:
            live = self._live.get(item.request_id)
            if live is not None:
                self._deliver(live, item, timings.get(item.request_id))
        self._metrics.observe_report(report)
        for listener in self.report_listeners:
            listener()

    def _take_adapters(self, connection: Connection, news: AdapterNews) -> None:
        connection.adapters = news.adapters
        self.adapter_calls.tell(news.answers)
        for listener in self.adapter_listeners:
            listener()

    def _deliver(self, live: LiveRequest, item: RequestNews, timing: RequestTiming | None) -> None:
        submission = live.submission
        if item.finish is not None:
            self._end(live, item.finish, timing)
        live.add(item, timing)
        # Some sample holds at least its share of what is too much.
        if live.unread_tokens * len(submission.samples) > submission.max_unread_tokens and submission.num_open:
            self._check_reader(submission)

    def _check_reader(self, submission: Submission) -> None:
        unread, most = submission.unread_tokens, submission.max_unread_tokens
        if unread > most:
            message = f"the reader left {unread:,} tokens unread; at most {most:,} are kept"
            self.cancel(submission.samples, Refusal(RefusalCode.SLOW_READER, message))

    def _end(self, live: LiveRequest, finish: Finish, timing: RequestTiming | None) -> None:
        submission = live.submission
        del self._live[live.request_id]
        submission.ended(finish)
        if finish.error is not None and finish.error.code is RefusalCode.FAILED:
            self.pulse.faulted()
        if submission.outcome is not None and submission.num_open == 0:
            del self._by_name[submission.name]
            self._metrics.count_request(submission, submission.outcome)
        submission.trace.sample_ended(live.index, finish, timing)
        if submission.num_open == 0:
            submission.trace.ended(submission.outcome or finish, sum(submission.completion_tokens), self._clock())
        if not self._live:
            self._idle.set()
        self._log.ended(live, finish, timing, self._clock() - submission.started)
