"""The loop with requests that wait for their grammar: aborts, deadlines, refusals, a full desk, waking."""

import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest

from engine_service.core.outcome import FinishReason, Refusal, RefusalCode, RequestNews
from engine_service.core.sampling import ConstraintKind, SamplingParams, StructuredOutput
from engine_service.core.scheduler import Scheduler
from engine_service.loop.engine_loop import EngineLoop
from engine_service.loop.grammar_desk import GrammarDesk
from engine_service.loop.mailbox import EngineMailbox, socket_pair
from engine_service.loop.messages import Abort, Shutdown, StepReport, Submit
from tests.fixtures.scripted_engine import SMALL, ScriptedWorker, continuation, limits_of

CAUSE = Refusal(RefusalCode.CANCELLED, "test")
BAD = Refusal(RefusalCode.INVALID, "no such schema", "request.sampling.structured_output.json_schema")
Event = tuple[str, object]


class HeldCompiler:
    """Hands out futures that the test completes."""

    def __init__(self) -> None:
        self.futures: dict[str, Future[object]] = {}
        self.closed = False
        self.prepared = 0

    def prepare(self) -> None:
        assert not self.futures
        self.prepared += 1

    def compile(self, constraint: StructuredOutput, resumed: Sequence[int] = ()) -> "Future[object]":
        return self.futures.setdefault(constraint.text, Future())

    def close(self) -> None:
        self.closed = True


class Script:
    """A mailbox and clock that take turns of: commands, a step of the clock, or something to do."""

    def __init__(self, turns: list[object]) -> None:
        self.turns = turns
        self.now = 100.0
        self.news: list[RequestNews] = []
        self.sleeps: list[float | None] = []
        self.woken = 0

    def clock(self) -> float:
        return self.now

    def wake(self) -> None:
        self.woken += 1

    def take(self, *, wait: bool, timeout_s: float | None = None) -> list[object]:
        if not wait:
            return []
        self.sleeps.append(timeout_s)
        turn = self.turns.pop(0) if self.turns else [Shutdown()]
        if isinstance(turn, float):
            self.now += turn
            return []
        if callable(turn):
            turn()
            return []
        assert isinstance(turn, list)
        return turn

    def publish(self, report: StepReport) -> None:
        self.news.extend(report.news)

    def ends(self) -> dict[int, tuple[FinishReason, Refusal | None]]:
        """Each request ends once."""
        ended = [news for news in self.news if news.finish is not None]
        assert len({news.request_id for news in ended}) == len(ended)
        return {news.request_id: (news.finish.reason, news.finish.error) for news in ended if news.finish}


def structured(request_id: int, text: str = "a", timeout_s: float | None = None, samples: int = 1) -> Submit:
    constraint = StructuredOutput(ConstraintKind.REGEX, text)
    sampling = SamplingParams(3, seed=1, temperature=0.0, structured_output=constraint)
    return Submit(request_id, (5, 6), sampling, timeout_s, samples=samples)


def run(build: Callable[[HeldCompiler], list[object]], max_waiting: int = 8) -> tuple[Script, ScriptedWorker]:
    compiler, worker = HeldCompiler(), ScriptedWorker()
    script = Script(build(compiler))
    desk = GrammarDesk(compiler, max_waiting=max_waiting, wake=script.wake)
    scheduler = Scheduler(SMALL)
    loop = EngineLoop(
        scheduler, worker, script, limits=limits_of(SMALL), clock=script.clock, overlap=False, grammars=desk
    )
    loop.run()
    scheduler.check_invariants()
    assert compiler.closed
    assert compiler.prepared == 1
    assert len(desk) == 0
    return script, worker


def done(compiler: HeldCompiler, text: str, found: object) -> Callable[[], None]:
    return lambda: compiler.futures[text].set_result(found)


def test_a_request_runs_once_its_grammar_is_there_and_others_run_before() -> None:
    free = Submit(9, (7,), SamplingParams(3, seed=1, temperature=0.0))
    grammar = object()
    script, worker = run(lambda c: [[structured(1), free], done(c, "a", grammar)])
    assert [news.request_id for news in script.news if news.finish] == [9, 1]
    assert [token for news in script.news if news.request_id == 1 for token in news.token_ids] == continuation(
        [5, 6], 3
    )
    (new,) = [new for plan in worker.plans for new in plan.new if new.request_id == 1]
    assert new.sampling.structured_output is not None
    assert new.sampling.structured_output.compiled is grammar
    assert script.woken == 1


def test_a_refusal_of_the_compiler_ends_every_sample() -> None:
    script, worker = run(lambda c: [[structured(1, samples=3)], done(c, "a", BAD)])
    assert script.ends() == dict.fromkeys((1, 2, 3), (FinishReason.ERROR, BAD))
    assert worker.plans == []


def test_a_crash_of_the_compiler_ends_the_request_alone() -> None:
    script, _ = run(
        lambda c: [
            [structured(1), structured(5, "b")],
            lambda: c.futures["a"].set_exception(ValueError()),
            done(c, "b", 1),
        ]
    )
    reason, error = script.ends()[1]
    assert (reason, error and error.code) == (FinishReason.ERROR, RefusalCode.FAILED)
    assert script.ends()[5] == (FinishReason.LENGTH, None)


def test_an_abort_ends_the_wait_at_once() -> None:
    script, worker = run(lambda c: [[structured(1)], [Abort((1, 1, 77), CAUSE)]])
    assert script.ends() == {1: (FinishReason.ABORT, CAUSE)}
    assert worker.plans == []


def test_an_abort_of_one_sample_leaves_the_others() -> None:
    script, _ = run(lambda c: [[structured(1, samples=3)], [Abort((2,), CAUSE)], done(c, "a", object())])
    ends = script.ends()
    assert ends[2] == (FinishReason.ABORT, CAUSE)
    assert ends[1] == ends[3] == (FinishReason.LENGTH, None)


def test_aborting_all_samples_one_by_one_ends_the_wait() -> None:
    script, worker = run(lambda c: [[structured(1, samples=2)], [Abort((1,), CAUSE)], [Abort((2,), CAUSE)]])
    assert script.ends() == {1: (FinishReason.ABORT, CAUSE), 2: (FinishReason.ABORT, CAUSE)}
    assert worker.plans == []


def test_a_deadline_passes_while_it_waits() -> None:
    script, worker = run(lambda c: [[structured(1, timeout_s=2.0), structured(3, "b", timeout_s=5.0)], 2.0, 3.0])
    ends = script.ends()
    assert {number: (reason, error and error.code) for number, (reason, error) in ends.items()} == {
        1: (FinishReason.ABORT, RefusalCode.DEADLINE),
        3: (FinishReason.ABORT, RefusalCode.DEADLINE),
    }
    assert script.sleeps == [None, 2.0, 3.0, None]
    assert worker.plans == []


def test_the_wait_counts_against_the_deadline() -> None:
    script, _ = run(lambda c: [[structured(1, timeout_s=2.0)], 1.5, done(c, "a", 1)])
    assert script.ends() == {1: (FinishReason.LENGTH, None)}
    script, worker = run(lambda c: [[structured(1, timeout_s=2.0)], 2.5])
    assert worker.plans == []


def test_a_full_desk_refuses() -> None:
    waiting = [structured(number, str(number)) for number in range(1, 5)]
    script, _ = run(lambda c: [waiting, *(lambda t=t: c.futures[t].set_result(1) for t in "123")], max_waiting=3)
    reason, error = script.ends()[4]
    assert error is not None
    assert (reason, error.code, error.message) == (
        FinishReason.ERROR, RefusalCode.QUEUE_FULL, "3 grammars wait to be compiled, the limit is 3",
    )  # fmt: skip
    assert error.retry_after_s


def test_without_a_desk_it_is_refused() -> None:
    script = Script([[structured(1)]])
    EngineLoop(
        Scheduler(SMALL), ScriptedWorker(), script, limits=limits_of(SMALL), clock=script.clock, overlap=False
    ).run()
    reason, error = script.ends()[1]
    assert error is not None
    assert (reason, error.code, error.field) == (
        FinishReason.ERROR, RefusalCode.INVALID, "request.sampling.structured_output",
    )  # fmt: skip


@pytest.mark.parametrize("early", [False, True])
def test_wake_ends_a_wait_for_commands(early: bool) -> None:
    """Before it as well as during it; once, and harmlessly after the close."""
    front, end = socket_pair()
    mailbox = EngineMailbox(end)
    if early:
        mailbox.wake()
    else:
        threading.Timer(0.05, mailbox.wake).start()
    assert mailbox.take(wait=True) == []
    assert mailbox.take(wait=True, timeout_s=0.01) == []
    mailbox.close()
    mailbox.wake()
    assert isinstance(front, socket.socket)
    front.close()
