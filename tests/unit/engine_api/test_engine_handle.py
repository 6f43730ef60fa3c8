"""The front's handle: unread news, cancels, slow readers, death, and counting each request once."""

import asyncio
from dataclasses import dataclass, field

import pytest
from prometheus_client import CollectorRegistry

from engine_service.api.engine_handle import SHUTTING_DOWN, STARTING, EngineHandle
from engine_service.api.engine_metrics import EngineMetrics
from engine_service.api.errors import grpc_status, outcome_of
from engine_service.api.live_request import LiveRequest, Submission
from engine_service.api.parse import EngineRequest
from engine_service.core.outcome import Finish, FinishReason, Refusal, RefusalCode, RequestNews
from engine_service.core.sampling import SamplingParams
from engine_service.core.scheduler import Scheduler
from engine_service.loop.messages import Abort, EngineInfo, EngineReady, StepReport, Submit
from tests.fixtures.scripted_engine import SMALL

STATS = Scheduler(SMALL).stats()
INFO = EngineInfo(1, "e", 512, 512, (0,), "", "Scripted", "float32", 4, 256, 16)
GONE = Refusal(RefusalCode.ENGINE_GONE, "gone")
CANCELLED = Refusal(RefusalCode.CANCELLED, "cancelled")


@dataclass
class Commands:
    """A mailbox end that takes `room` submits."""

    room: int = 100
    sent: list[object] = field(default_factory=list)

    def send(self, command: object, *, always: bool = False) -> bool:
        if not always and len(self.sent) >= self.room:
            return False
        self.sent.append(command)
        return True


@dataclass
class World:
    handle: EngineHandle
    commands: Commands
    registry: CollectorRegistry
    woken: list[str] = field(default_factory=list)

    def submit(self, name: str, samples: int = 1, logprobs: int | None = None) -> Submission | Refusal:
        request = EngineRequest(name, (1, 2), SamplingParams(10, 5, logprobs=logprobs), None, "", samples)
        return self.handle.submit(request, lambda live: self.woken.append(live.submission.name))

    def samples(self, name: str, samples: int, logprobs: int | None = None) -> tuple[LiveRequest, ...]:
        submission = self.submit(name, samples, logprobs)
        assert isinstance(submission, Submission)
        return submission.samples

    def live(self, name: str) -> LiveRequest:
        return self.samples(name, 1)[0]

    def news(self, live: LiveRequest, *tokens: int, finish: Finish | None = None) -> None:
        self.handle.on_report(StepReport((RequestNews(live.request_id, tokens, finish),), STATS))

    def count(self, outcome: str, code: str = "") -> float:
        labels = {"outcome": outcome, "code": code}
        return self.registry.get_sample_value("tokenwire_engine_requests_total", labels) or 0.0


def finish(reason: FinishReason, completion: int, error: Refusal | None = None) -> Finish:
    return Finish(reason, 2, completion, 0, error=error)


def make(room: int = 100, max_unread_tokens: int = 5, attach: bool = True) -> World:
    registry = CollectorRegistry()
    handle = EngineHandle(metrics=EngineMetrics(registry), clock=lambda: 0.0, max_unread_tokens=max_unread_tokens)
    world = World(handle, Commands(room), registry)
    if attach:
        handle.attach(EngineReady(INFO, STATS), world.commands)
    return world


async def test_news_is_merged_until_it_is_taken_and_wakes_once() -> None:
    world = make()
    live = world.live("a")
    world.news(live, 1)
    world.news(live, 2, 3)
    assert world.woken == ["a"]
    assert live.take().token_ids == [1, 2, 3]
    assert live.take().token_ids == []
    world.news(live, 4, finish=finish(FinishReason.STOP, 4))
    assert world.woken == ["a", "a"]
    unread = live.take()
    assert unread.token_ids == [4]
    assert unread.finish == finish(FinishReason.STOP, 4)
    assert world.handle.num_live == 0


async def test_cancel_discards_unread_tokens_and_says_what_was_given() -> None:
    """B039: after a cancel no token comes, only one finish, whose usage is what the reader got."""
    world = make()
    live = world.live("a")
    world.news(live, 1, 2)
    live.take()
    world.news(live, 3)
    world.handle.cancel([live], CANCELLED)
    world.handle.cancel([live], CANCELLED)
    world.news(live, 4)
    assert live.take().token_ids == []
    world.news(live, 5, finish=finish(FinishReason.ABORT, 5, CANCELLED))
    unread = live.take()
    assert (unread.token_ids, unread.finish) == ([], finish(FinishReason.ABORT, 2, CANCELLED))
    aborts = [command for command in world.commands.sent if isinstance(command, Abort)]
    assert aborts == [Abort((live.request_id,), CANCELLED)]
    world.handle.cancel([live], CANCELLED)
    assert len(world.commands.sent) == 2


async def test_slow_reader_is_cancelled_with_the_numbers() -> None:
    world = make(max_unread_tokens=5)
    live = world.live("a")
    world.news(live, 1, 2, 3, 4, 5)
    assert not live.is_cut
    world.news(live, 6)
    assert live.unread_tokens == 0
    abort = world.commands.sent[-1]
    assert isinstance(abort, Abort)
    assert abort.cause.code is RefusalCode.SLOW_READER
    assert "6" in abort.cause.message
    assert "5" in abort.cause.message


async def test_abort_by_name_returns_when_the_engine_let_go() -> None:
    world = make()
    live = world.live("a")
    await asyncio.wait_for(world.handle.abort(["unknown"]), 1)
    waiting = asyncio.create_task(world.handle.abort(["a", "a", "unknown"]))
    done, _ = await asyncio.wait({waiting}, timeout=0)
    assert not done
    world.news(live, finish=finish(FinishReason.ABORT, 0, CANCELLED))
    await asyncio.wait_for(waiting, 1)
    assert world.count("abort", "cancelled") == 1


async def test_names_are_unique_among_live_requests() -> None:
    world = make()
    live = world.live("a")
    refusal = world.submit("a")
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.DUPLICATE
    world.news(live, finish=finish(FinishReason.LENGTH, 1))
    assert isinstance(world.submit("a"), Submission)


async def test_full_mailbox_is_queue_full_and_leaves_no_trace() -> None:
    world = make(room=1)
    world.live("a")
    refusal = world.submit("b")
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.QUEUE_FULL
    assert refusal.retry_after_s
    assert world.handle.num_live == 1


async def test_death_ends_every_request_at_once() -> None:
    """B138: nobody waits for an engine that is gone."""
    world = make()
    connection = world.handle.current
    assert connection is not None
    lives = [world.live(name) for name in "abc"]
    world.news(lives[0], 1)
    waiting = asyncio.create_task(world.handle.abort(["c"]))
    await asyncio.sleep(0)
    world.handle.detach(GONE)
    await asyncio.wait_for(waiting, 1)
    await asyncio.wait_for(world.handle.wait_idle(), 1)
    assert connection.ended.is_set()
    assert lives[0].take().finish == finish(FinishReason.ERROR, 1, GONE)
    assert world.count("error", "engine_gone") == 3
    assert world.handle.connection() == STARTING
    assert world.submit("d") == STARTING
    world.handle.attach(EngineReady(INFO, STATS), world.commands)
    assert isinstance(world.submit("d"), Submission)


async def test_draining_refuses_new_work_and_waits_for_the_old() -> None:
    world = make()
    live = world.live("a")
    world.handle.drain()
    assert world.submit("b") == SHUTTING_DOWN
    idle = asyncio.create_task(world.handle.wait_idle())
    await asyncio.sleep(0)
    assert not idle.done()
    world.news(live, 1, finish=finish(FinishReason.LENGTH, 1))
    await asyncio.wait_for(idle, 1)


async def test_samples_end_one_by_one_and_are_counted_once() -> None:
    world = make()
    first, second, third = world.samples("a", 3)
    assert [(s.request_id, s.index, s.seed) for s in (first, second, third)] == [(1, 0, 5), (2, 1, 6), (3, 2, 7)]
    (command,) = world.commands.sent
    assert isinstance(command, Submit)
    assert (command.request_id, command.samples) == (1, 3)
    assert world.live("b").request_id == 4
    world.news(second, 8, finish=finish(FinishReason.STOP, 1))
    world.news(first, finish=finish(FinishReason.ERROR, 0, GONE))
    assert isinstance(world.submit("a"), Refusal)
    assert world.count("stop") + world.count("error", "engine_gone") == 0
    world.news(third, 9, finish=finish(FinishReason.LENGTH, 1))
    assert [len(sample.take().token_ids) for sample in (first, second, third)] == [0, 1, 1]
    assert (world.count("stop"), world.count("error", "engine_gone"), world.count("length")) == (0, 1, 0)
    assert isinstance(world.submit("a"), Submission)


async def test_one_sample_or_all_of_them_are_cancelled() -> None:
    world = make()
    samples = world.samples("a", 3)
    world.handle.cancel(samples[1:2], CANCELLED)
    assert world.commands.sent[-1] == Abort((2,), CANCELLED)
    world.news(samples[2], finish=finish(FinishReason.STOP, 0))
    world.handle.cancel(samples, CANCELLED)
    assert world.commands.sent[-1] == Abort((1,), CANCELLED)
    world.handle.cancel(samples, CANCELLED)
    assert len(world.commands.sent) == 3
    assert (world.handle.num_live, len(world.woken)) == (2, 1)


async def test_a_reader_is_slow_by_all_its_samples_together() -> None:
    world = make(max_unread_tokens=5)
    first, second = world.samples("a", 2)
    world.news(first, 1, 2, 3)
    world.news(second, 4, 5)
    assert not first.is_cut
    world.news(second, 6)
    abort = world.commands.sent[-1]
    assert isinstance(abort, Abort)
    assert (abort.request_ids, abort.cause.code) == ((1, 2), RefusalCode.SLOW_READER)
    assert "6" in abort.cause.message


async def test_log_probabilities_count_against_a_slow_reader() -> None:
    world = make(max_unread_tokens=40)
    (live,) = world.samples("a", 1, logprobs=6)
    world.news(live, 1, 2, 3, 4, 5)
    assert not live.is_cut
    world.news(live, 6)
    assert live.is_cut


async def test_news_of_unknown_requests_is_ignored() -> None:
    world = make()
    world.handle.on_report(StepReport((RequestNews(99, (1,), finish(FinishReason.STOP, 1)),), STATS))
    assert [command for command in world.commands.sent if isinstance(command, Submit)] == []


def test_every_refusal_has_a_status() -> None:
    assert {code: grpc_status(code).name for code in RefusalCode} == {
        RefusalCode.INVALID: "INVALID_ARGUMENT",
        RefusalCode.TOO_LARGE: "RESOURCE_EXHAUSTED",
        RefusalCode.QUEUE_FULL: "RESOURCE_EXHAUSTED",
        RefusalCode.SLOW_READER: "RESOURCE_EXHAUSTED",
        RefusalCode.CANCELLED: "CANCELLED",
        RefusalCode.DEADLINE: "DEADLINE_EXCEEDED",
        RefusalCode.TOO_LATE: "DEADLINE_EXCEEDED",
        RefusalCode.UNKNOWN_ADAPTER: "NOT_FOUND",
        RefusalCode.SHUTTING_DOWN: "UNAVAILABLE",
        RefusalCode.ENGINE_GONE: "UNAVAILABLE",
        RefusalCode.DUPLICATE: "ALREADY_EXISTS",
        RefusalCode.FAILED: "INTERNAL",
    }


@pytest.mark.parametrize(
    ("reason", "code", "outcome"),
    [
        (FinishReason.STOP, None, "stop"),
        (FinishReason.LENGTH, None, "length"),
        (FinishReason.ABORT, RefusalCode.CANCELLED, "abort"),
        (FinishReason.ABORT, RefusalCode.SHUTTING_DOWN, "abort"),
        (FinishReason.ERROR, RefusalCode.QUEUE_FULL, "rejected"),
        (FinishReason.ERROR, RefusalCode.FAILED, "error"),
        (FinishReason.ERROR, RefusalCode.ENGINE_GONE, "error"),
    ],
)
def test_outcomes(reason: FinishReason, code: RefusalCode | None, outcome: str) -> None:
    error = None if code is None else Refusal(code, "x")
    assert outcome_of(Finish(reason, 1, 0, 0, error=error)) == outcome
