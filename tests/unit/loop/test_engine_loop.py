"""The loop with the real scheduler and a scripted worker: plain and overlapped give the same news."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.core.outcome import FinishReason, Refusal, RefusalCode
from engine_service.core.sampling import SamplingParams
from engine_service.core.scheduler import Scheduler, SchedulerConfig
from engine_service.loop.engine_loop import EngineLoop
from engine_service.loop.messages import Abort, Command, Shutdown, StepReport, Submit
from tests.fixtures.scripted_engine import SMALL, VOCAB, ScriptedWorker, continuation, limits_of

CAUSE = Refusal(RefusalCode.CANCELLED, "test")


@dataclass
class ScriptedMailbox:
    """Hands out batches of commands: one per turn, the rest on waiting. Ends the loop when it would sleep for ever.

    `on_sleep` is told how long the loop would sleep.
    """

    batches: list[list[Command]]
    on_sleep: Callable[[float], None] = lambda timeout_s: None
    reports: list[StepReport] = field(default_factory=list)
    sleeps: list[float | None] = field(default_factory=list)

    def take(self, *, wait: bool, timeout_s: float | None = None) -> list[object]:
        if self.batches:
            return list(self.batches.pop(0))
        if not wait:
            return []
        self.sleeps.append(timeout_s)
        if timeout_s is None:
            return [Shutdown()]
        self.on_sleep(timeout_s)
        return []

    def publish(self, report: StepReport) -> None:
        self.reports.append(report)


@dataclass
class ManualClock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def submit(request_id: int, prompt: list[int], max_tokens: int = 5, timeout_s: float | None = None) -> Submit:
    return Submit(request_id, tuple(prompt), SamplingParams(max_tokens, seed=1, temperature=0.0), timeout_s)


def run(
    batches: list[list[Command]], *, overlap: bool, config: SchedulerConfig = SMALL
) -> tuple[ScriptedMailbox, ScriptedWorker]:
    clock = ManualClock()
    mailbox = ScriptedMailbox(batches, clock.advance)
    worker = ScriptedWorker()
    limits = limits_of(config)
    EngineLoop(Scheduler(config), worker, mailbox, limits=limits, clock=clock, overlap=overlap, checks_steps=True).run()
    return mailbox, worker


def streams(mailbox: ScriptedMailbox) -> dict[int, tuple[list[int], FinishReason]]:
    """Tokens and finish per request; fails on a token after a finish or a second finish (B039)."""
    tokens: dict[int, list[int]] = {}
    reasons: dict[int, FinishReason] = {}
    for report in mailbox.reports:
        for news in report.news:
            assert news.request_id not in reasons
            tokens.setdefault(news.request_id, []).extend(news.token_ids)
            if news.finish is not None:
                reasons[news.request_id] = news.finish.reason
                if news.finish.error is None:
                    assert news.finish.completion_tokens == len(tokens[news.request_id])
    return {request_id: (tokens[request_id], reason) for request_id, reason in reasons.items()}


@pytest.mark.parametrize("overlap", [False, True])
def test_requests_get_their_continuations(overlap: bool) -> None:
    prompts = {i: [i, 7, *range(20, 20 + 9 * i)] for i in range(1, 9)}
    mailbox, worker = run([[submit(i, prompt, 3 + i) for i, prompt in prompts.items()]], overlap=overlap)
    assert streams(mailbox) == {i: (continuation(prompt, 3 + i), FinishReason.LENGTH) for i, prompt in prompts.items()}
    final = mailbox.reports[-1].stats
    assert (final.running, final.waiting, final.used_blocks) == (0, 0, 0)
    assert sum(len(report.steps) for report in mailbox.reports) == len(worker.plans) == final.steps


small_prompts = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(
    prompts=st.lists(st.tuples(small_prompts, st.integers(1, 30), st.integers(0, 12)), min_size=1, max_size=10),
    num_blocks=st.integers(20, 60),
    budget=st.integers(16, 64),
)
def test_overlapped_equals_plain(prompts: list[tuple[list[int], int, int]], num_blocks: int, budget: int) -> None:
    """Also while requests are preempted, arrive in the middle and share prefixes."""
    config = replace(
        SMALL,
        num_blocks=num_blocks,
        max_model_len=70,
        step_token_budget=budget,
        prefill_chunk_size=min(budget, 32),
    )

    def batches() -> list[list[Command]]:
        turns: list[list[Command]] = [[] for _ in range(13)]
        for request_id, (prompt, max_tokens, turn) in enumerate(prompts):
            turns[turn].append(submit(request_id, prompt, min(max_tokens, 70 - len(prompt))))
        return turns

    plain = streams(run(batches(), overlap=False, config=config)[0])
    overlapped = streams(run(batches(), overlap=True, config=config)[0])
    assert plain == overlapped
    for request_id, (prompt, max_tokens, _) in enumerate(prompts):
        expected = continuation(prompt, min(max_tokens, 70 - len(prompt)))
        assert plain[request_id] == (expected, FinishReason.LENGTH)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "ids",
    [(99,), (1, 1), (1, 2, 99, 2), tuple(range(300))],
    ids=["unknown", "twice", "many", "256-and-more"],
)
def test_abort_table(overlap: bool, ids: tuple[int, ...]) -> None:
    """B038: unknown, twice, before admission and very many at once; the others are not disturbed."""
    batches: list[list[Command]] = [
        [Abort(ids, CAUSE)],
        [submit(i, [i, 3, 5], 20) for i in range(1, 5)],
        [],
        [],
        [Abort(ids, CAUSE), Abort(ids, CAUSE)],
    ]
    mailbox, _ = run(batches, overlap=overlap)
    for request_id, (tokens, reason) in streams(mailbox).items():
        expected = continuation([request_id, 3, 5], 20)
        if request_id in ids:
            assert reason is FinishReason.ABORT
            assert tokens == expected[: len(tokens)]
        else:
            assert (tokens, reason) == (expected, FinishReason.LENGTH)
    assert set(streams(mailbox)) == {1, 2, 3, 4}
    assert mailbox.reports[-1].stats.used_blocks == 0


@pytest.mark.parametrize(
    ("prompt", "max_tokens"),
    [([], 3), ([1, VOCAB], 3), ([1, -1], 3), ([1] * 512, 3), ([1] * 600, 3), ([1], 0), ([1], -5)],
)
def test_bad_request_in_the_loop_harms_nobody(prompt: list[int], max_tokens: int) -> None:
    """The front checks first; even so no request can kill the loop."""
    mailbox, _ = run([[submit(1, [4, 5], 6)], [submit(2, prompt, max_tokens)]], overlap=False)
    ended = streams(mailbox)
    assert ended[2] == ([], FinishReason.ERROR)
    assert ended[1] == (continuation([4, 5], 6), FinishReason.LENGTH)


def test_full_queue_is_a_refusal_with_numbers() -> None:
    config = replace(SMALL, max_num_requests=1, max_waiting_requests=2)
    mailbox, _ = run([[submit(i, [i, 1], 4) for i in range(1, 6)]], overlap=False, config=config)
    refusals = [
        news.finish.error
        for report in mailbox.reports
        for news in report.news
        if news.finish is not None and news.finish.error is not None
    ]
    assert refusals
    for refusal in refusals:
        assert refusal.code is RefusalCode.QUEUE_FULL
        assert "2" in refusal.message
        assert refusal.retry_after_s


@pytest.mark.parametrize("overlap", [False, True])
def test_idle_loop_sleeps_and_wakes_for_the_next_deadline(overlap: bool) -> None:
    """B035, B148: a request whose deadline passed is never computed; the sleep ends with the deadline."""
    mailbox, worker = run([[submit(1, [9], 3, timeout_s=0.0), submit(2, [8], 3, timeout_s=50.0)]], overlap=overlap)
    ended = streams(mailbox)
    assert ended[1] == ([], FinishReason.ABORT)
    assert ended[2] == (continuation([8], 3), FinishReason.LENGTH)
    assert all(chunk.request_id == 2 for plan in worker.plans for chunk in plan.chunks)
    assert mailbox.sleeps[-1] is None


def test_timings_of_stages_are_reported_once_per_request() -> None:
    mailbox, _ = run([[submit(1, [9], 3), submit(2, [], 3)]], overlap=False)
    timings = [timing for report in mailbox.reports for timing in report.finished]
    assert [(t.request_id, t.queue_s, t.prefill_s, t.decode_s) for t in timings] == [(1, 0.0, 0.0, 0.0)]


@pytest.mark.parametrize("overlap", [False, True])
def test_worker_exception_ends_the_loop(overlap: bool) -> None:
    """B138: after it nothing about the device is known, so the engine must end."""
    mailbox = ScriptedMailbox([[submit(1, [13], 3)]])
    loop = EngineLoop(
        Scheduler(SMALL),
        ScriptedWorker(poison=13),
        mailbox,
        limits=limits_of(SMALL),
        clock=time.monotonic,
        overlap=overlap,
    )
    with pytest.raises(RuntimeError, match="device is lost"):
        loop.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_a_block_that_was_not_given_back_stops_an_idle_loop(overlap: bool) -> None:
    """A leak is a bug of ours: better a fresh engine than one that fills up. Checked at every idle moment."""
    scheduler = Scheduler(SMALL)
    scheduler._kv.pool.take()
    mailbox = ScriptedMailbox([[submit(1, [5, 6])]])
    loop = EngineLoop(
        scheduler, ScriptedWorker(), mailbox, limits=limits_of(SMALL), clock=ManualClock(), overlap=overlap
    )
    with pytest.raises(AssertionError, match="1 of 256 blocks are held"):
        loop.run()
    assert [item.request_id for report in mailbox.reports for item in report.news if item.finish] == [1]


@pytest.mark.parametrize("overlap", [False, True])
def test_checked_steps_find_a_leak_while_requests_run(overlap: bool) -> None:
    """What soak tests turn on: the loop ends with the numbers after the step, not when it is idle at last."""
    scheduler = Scheduler(SMALL)
    scheduler._kv.pool.take()
    mailbox = ScriptedMailbox([[submit(1, [5, 6])]])
    loop = EngineLoop(
        scheduler,
        ScriptedWorker(),
        mailbox,
        limits=limits_of(SMALL),
        clock=ManualClock(),
        overlap=overlap,
        checks_steps=True,
    )
    with pytest.raises(AssertionError, match="1 references, in 0 block tables"):
        loop.run()
    assert not [item for report in mailbox.reports for item in report.news if item.finish]
