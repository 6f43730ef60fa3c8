"""The engine loop: take commands, plan, execute, settle, publish one message with all news.

Must not know: torch, gRPC, how a plan is made or executed.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from engine_service.core.admission import EngineLimits, check_request, check_resumed
from engine_service.core.family import Family, sampling_of
from engine_service.core.outcome import (
    NO_ADAPTERS,
    NO_GRAMMARS,
    Finish,
    FinishReason,
    Refusal,
    RefusalCode,
    RequestNews,
)
from engine_service.core.plan import Plan
from engine_service.core.request import Request
from engine_service.core.scheduler import Scheduler
from engine_service.core.stats import EngineStats
from engine_service.loop.adapter_desk import AdapterDesk
from engine_service.loop.grammar_desk import GrammarDesk
from engine_service.loop.messages import (
    Abort,
    AdapterNews,
    DumpSteps,
    LoadAdapter,
    Ping,
    Shutdown,
    StepReport,
    StepTiming,
    Submit,
    UnloadAdapter,
    WatchKvEvents,
)
from engine_service.loop.request_timings import RequestTimings
from engine_service.loop.step_recorder import NullRecorder, Recorder
from engine_service.loop.worker_protocol import Worker

Clock = Callable[[], float]


class Mailbox(Protocol):
    """What the loop needs of the engine's end of a mailbox."""

    def take(self, *, wait: bool, timeout_s: float | None = None) -> list[object]: ...

    def publish(self, report: StepReport) -> None: ...


class EngineLoop:
    """Runs on the engine process's only thread and is the only user of its scheduler and worker.

    Plain: each plan is settled before the next one is made. Overlapped (depth 1): the next plan is made and
    submitted first, so the worker is never idle while the scheduler thinks. The plain loop is the reference:
    both give every request the same news.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        worker: Worker,
        mailbox: Mailbox,
        *,
        limits: EngineLimits,
        clock: Clock,
        overlap: bool,
        grammars: GrammarDesk | None = None,
        adapters: AdapterDesk | None = None,
        checks_steps: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        """Without `grammars` a request with a structured output is refused, without `adapters` one with an adapter.

        `recorder` is told of every step. `checks_steps`: the scheduler's invariants are checked after each step, which
        is slow and for tests.
        """
        self._scheduler = scheduler
        self._worker = worker
        self._mailbox = mailbox
        self._limits = limits
        self._clock = clock
        self._overlap = overlap
        self._grammars = grammars
        self._adapters = adapters
        self._checks_steps = checks_steps
        self._recorder: Recorder = recorder or NullRecorder()
        self._timings = RequestTimings()
        self._refused: list[RequestNews] = []
        self._is_stopping = False
        self._was_asked = False

    def run(self) -> None:
        """Until Shutdown, which closes the worker. Raises FrontGone and what the worker raised: both are the end."""
        if self._grammars is not None:
            self._grammars.prepare()
        in_flight: Plan | None = None
        is_idle = False
        last_settled = self._clock()
        while True:
            self._take_commands(wait=is_idle and not self._recorder.is_dumping)
            if self._is_stopping:
                self._close()
                return
            started = self._clock()
            self._take_decided(started)
            plan = self._submit_next(started)
            # Refusals, aborts and passed deadlines need not wait for the step.
            self._publish(())
            settle, in_flight = (in_flight, plan) if self._overlap else (plan, None)
            steps: tuple[StepTiming, ...] = ()
            if settle is not None:
                asked = self._clock()
                result = self._worker.result()
                answered = self._clock()
                self._scheduler.apply(result)
                self._timings.last_step = settle.step
                now = self._clock()
                steps = (StepTiming.of(settle, now - max(started, last_settled)),)
                last_settled = now
                self._scheduler.observe_step(steps[0].seconds, steps[0].num_tokens)
                if self._checks_steps:
                    self._scheduler.check_invariants()
            stats = self._publish(steps)
            if settle is not None and stats is not None:
                self._recorder.settled(settle.step, (asked, answered, now, self._clock()), stats)
            is_idle = plan is None and settle is None
            if is_idle:
                self._scheduler.check_idle()

    def _take_commands(self, *, wait: bool) -> None:
        timeout_s = None
        if wait and (deadline := self._next_deadline()) is not None:
            timeout_s = deadline - self._clock()
        for command in self._mailbox.take(wait=wait, timeout_s=timeout_s):
            match command:
                case Submit():
                    self._submit(command)
                case Abort():
                    for request_id in command.request_ids:
                        self._scheduler.abort(request_id, command.cause)
                        for desk in (self._grammars, self._adapters):
                            if desk is not None:
                                desk.abort(request_id, command.cause)
                case WatchKvEvents():
                    self._scheduler.watch_kv_events(command.is_on, command.with_tokens)
                case Ping():
                    self._was_asked = True
                case DumpSteps():
                    self._recorder.begin_dump(command.number, command.last_steps)
                case LoadAdapter() if self._adapters is not None:
                    self._adapters.load(command)
                case UnloadAdapter() if self._adapters is not None:
                    self._adapters.unload(command)
                case Shutdown():
                    self._is_stopping = True
                case _:
                    raise TypeError(f"not a command: {type(command).__name__}")

    def _submit(self, command: Submit) -> None:
        now = self._clock()
        # The front has checked it; checked again, so that no request can break the loop all others live in.
        refusal = check_request(command.token_ids, command.sampling, self._limits) or check_resumed(
            len(command.token_ids), command.resumed, command.sampling.max_tokens, self._limits
        )
        if refusal is None:
            refusal = self._take_in(command, now)
        for request_id in range(command.request_id, command.request_id + command.samples):
            if refusal is None:
                self._timings.arrived(request_id, now)
                self._recorder.arrived(request_id, command.name)
            else:
                self._refused.append(_refused(request_id, len(command.token_ids), refusal))

    def _take_in(self, command: Submit, now: float) -> Refusal | None:
        """To its adapter, if it wants one; then on."""
        if not command.adapter:
            return self._queue(command, now)
        accepted = NO_ADAPTERS if self._adapters is None else self._adapters.accept(command, now)
        return self._queue(accepted, now) if isinstance(accepted, Submit) else accepted

    def _queue(self, command: Submit, arrived: float) -> Refusal | None:
        """To the scheduler, by way of the grammars if it has one."""
        if command.sampling.structured_output is None:
            return self._scheduler.submit(*_samples(command, arrived))
        return NO_GRAMMARS if self._grammars is None else self._grammars.accept(command, arrived)

    def _take_decided(self, now: float) -> None:
        """The requests whose adapter is there or whose grammar is compiled go on; those that wait in vain end."""
        for decided in () if self._adapters is None else self._adapters.decided(now):
            command = decided.command
            refusal = decided.refusal or self._queue(command, decided.arrived)
            for request_id in range(command.request_id, command.request_id + command.samples):
                cause = decided.aborted.get(request_id)
                if refusal is not None:
                    self._refused.append(_refused(request_id, len(command.token_ids), cause or refusal))
                elif cause is not None:
                    self._scheduler.abort(request_id, cause)
                    if self._grammars is not None:
                        self._grammars.abort(request_id, cause)
        for decided in () if not self._grammars else self._grammars.decided(now):
            command = decided.command
            refusal = decided.refusal or self._scheduler.submit(*_samples(command, decided.arrived))
            for request_id in range(command.request_id, command.request_id + command.samples):
                cause = decided.aborted.get(request_id)
                if refusal is not None:
                    self._refused.append(_refused(request_id, len(command.token_ids), cause or refusal))
                elif cause is not None:
                    self._scheduler.abort(request_id, cause)

    def _next_deadline(self) -> float | None:
        owners = (self._scheduler, self._grammars, self._adapters)
        times = [owner.next_deadline() for owner in owners if owner is not None]
        return min((time for time in times if time is not None), default=None)

    def _close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
        self._worker.close()

    def _submit_next(self, now: float) -> Plan | None:
        plan = self._scheduler.plan(now)
        if plan is not None:
            planned = self._clock()
            self._timings.planned(plan, now)
            if (record := self._scheduler.last_record) is not None and record.preempted:
                self._timings.preempted(record.preempted)
            # Before the worker, so that a step it fails or hangs in is on record.
            self._recorder.planned(plan, self._scheduler.last_record, (now, planned))
            self._worker.submit(plan)
            self._recorder.submitted(plan.step, self._clock())
        return plan

    def _publish(self, steps: tuple[StepTiming, ...]) -> EngineStats | None:
        """One message with everything new; none when there is neither news nor a settled step, nor a question."""
        news = (*self._refused, *self._scheduler.take_news())
        self._refused.clear()
        kv_events = self._scheduler.take_kv_events()
        piece = self._recorder.next_piece()
        adapters = None if self._adapters is None else self._settle_adapters(self._adapters, news)
        if not (news or steps or kv_events or piece or adapters or self._was_asked):
            return None
        self._was_asked = False
        finished = self._timings.settle(news, self._clock())
        if finished:
            self._recorder.ended(news)
        stats = self._scheduler.stats()
        dump = () if piece is None else (piece,)
        self._mailbox.publish(StepReport(news, stats, steps, finished, kv_events, dump, adapters))
        return stats

    def _settle_adapters(self, desk: AdapterDesk, news: Sequence[RequestNews]) -> AdapterNews | None:
        for item in news:
            if item.finish is not None:
                desk.ended(item.request_id)
        return desk.take_news()


def _samples(command: Submit, now: float) -> list[Request]:
    """One request for each sample."""
    family = Family() if command.samples > 1 else None
    return [
        Request(
            command.request_id + place,
            command.token_ids,
            sampling_of(command.sampling, place),
            arrival=now,
            deadline=None if command.timeout_s is None else now + command.timeout_s,
            cache_salt=command.cache_salt,
            priority=command.priority,
            family=family,
            resumed=command.resumed,
            tenant=command.tenant,
            weight=command.weight,
            adapter=command.adapter_number,
        )
        for place in range(command.samples)
    ]


def _refused(request_id: int, prompt_tokens: int, refusal: Refusal) -> RequestNews:
    is_abort = refusal.code in (RefusalCode.CANCELLED, RefusalCode.DEADLINE)
    finish = Finish(FinishReason.ABORT if is_abort else FinishReason.ERROR, prompt_tokens, 0, 0, error=refusal)
    return RequestNews(request_id, (), finish)
