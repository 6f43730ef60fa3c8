"""How requests enter and end: abort, deadlines, full queues, failures, news and statistics."""

import pytest

from engine_service.core.outcome import Finish, FinishReason, Refusal, RefusalCode, RequestNews
from engine_service.core.plan import Result
from engine_service.core.scheduler import Scheduler
from tests.unit.core.core_driver import Engine, answer, config, prompt_of, request

GONE = Refusal(RefusalCode.CANCELLED, "the client has left")


def test_b035_a_cancelled_waiting_request_is_never_computed():
    """B035: with one slot, B is cancelled while A runs; C starts right after A."""
    engine = Engine(config(max_num_requests=1))
    a, b, c = (request(i, prompt_of(9, i), max_tokens=4, ignore_eos=True) for i in (1, 2, 3))
    for item in (a, b, c):
        engine.scheduler.submit(item)
    engine.step()
    engine.scheduler.abort(2, GONE)
    engine.run()
    computed = [chunk.request_id for plan in engine.plans for chunk in plan.chunks]
    assert computed == [1] * 5 + [3] * 5
    assert engine.scheduler.stats().prompt_tokens == 18
    assert engine.finish_of(2) == Finish(FinishReason.ABORT, 9, 0, 0, error=GONE)
    engine.assert_as_alone(a)
    engine.assert_as_alone(c)


def test_b038_aborts_of_any_id_at_any_time_are_harmless():
    """B038: unknown, twice, finished, before admission, 256 at once; the others' output is exact."""
    engine = Engine(config(max_waiting_requests=300))
    engine.scheduler.abort(99)
    keeper = request(0, prompt_of(6), max_tokens=8, ignore_eos=True)
    engine.scheduler.submit(keeper)
    for number in range(1, 257):
        engine.scheduler.submit(request(number, prompt_of(5, number), ignore_eos=True))
    for _ in range(3):
        engine.step()
    for number in range(1, 257):
        engine.scheduler.abort(number)
        engine.scheduler.abort(number)
    engine.scheduler.check_invariants()
    engine.run()
    engine.scheduler.abort(0)
    engine.assert_as_alone(keeper)
    assert engine.scheduler.take_news() == ()
    assert engine.scheduler.stats().finished_by_reason[FinishReason.ABORT] == 256


@pytest.mark.parametrize("in_flight", [1, 2])
def test_b039_no_token_after_an_abort(in_flight):
    """B039: results of plans in flight are not told, and the request ends exactly once."""
    scheduler = Scheduler(config())
    scheduler.submit(request(1, [7, 8, 9, 10]))
    plans = [scheduler.plan(0.0) for _ in range(in_flight)]
    scheduler.abort(1, GONE)
    assert scheduler.take_news() == (RequestNews(1, (), Finish(FinishReason.ABORT, 4, 0, 0, error=GONE)),)
    assert scheduler.stats().used_blocks == in_flight
    scheduler.check_invariants()
    for plan in plans:
        scheduler.apply(answer(plan))
    assert scheduler.take_news() == ()
    assert (scheduler.stats().used_blocks, scheduler.stats().generated_tokens) == (0, 0)


def test_blocks_are_back_at_once_when_nothing_is_in_flight():
    engine = Engine(config())
    engine.scheduler.submit(request(1, prompt_of(20)))
    engine.step()
    assert engine.scheduler.stats().used_blocks == 5
    engine.scheduler.abort(1)
    assert engine.scheduler.stats().used_blocks == 0


def test_b043_slots_are_back_after_many_cancels():
    """B043: after many times more cancels than slots, all slots can run again together."""
    engine = Engine(config(), depth=1)
    for number in range(40):
        engine.scheduler.submit(request(number, prompt_of(6, number), ignore_eos=True))
        engine.step()
        engine.scheduler.abort(number)
    for number in range(40, 44):
        engine.scheduler.submit(request(number, prompt_of(2, number), ignore_eos=True))
    engine.step()
    assert engine.scheduler.stats().running == 4


def test_an_id_can_be_used_again_after_its_end():
    engine = Engine(config(), depth=1)
    for _ in range(3):
        item = request(1, prompt_of(5), max_tokens=3, ignore_eos=True)
        engine.scheduler.submit(item)
        engine.step()
        engine.step()
        engine.scheduler.abort(1)
    again = request(1, prompt_of(7), max_tokens=3, ignore_eos=True)
    engine.news.clear()
    engine.scheduler.take_news()
    engine.run(again)
    engine.assert_as_alone(again)


@pytest.mark.parametrize(
    ("deadline", "now", "expires"),
    [(None, 1e9, False), (5.0, 4.999, False), (5.0, 5.0, True), (5.0, 6.0, True)],
)
def test_a_passed_deadline_ends_a_waiting_request_before_it_is_computed(deadline, now, expires):
    scheduler = Scheduler(config())
    scheduler.submit(request(1, [7, 8], deadline=deadline))
    assert scheduler.next_deadline() == deadline
    plan = scheduler.plan(now)
    assert (plan is None) is expires
    if expires:
        error = Refusal(RefusalCode.DEADLINE, "the deadline passed after 0 generated tokens")
        assert scheduler.take_news() == (RequestNews(1, (), Finish(FinishReason.ABORT, 2, 0, 0, error=error)),)
        assert scheduler.next_deadline() is None


def test_a_deadline_ends_a_running_request_and_frees_its_blocks():
    scheduler = Scheduler(config())
    scheduler.submit(request(1, [7, 8, 9], deadline=5.0))
    scheduler.submit(request(2, [3, 4], deadline=7.0))
    scheduler.apply(answer(scheduler.plan(1.0)))
    plan = scheduler.plan(5.5)
    assert [chunk.request_id for chunk in plan.chunks] == [2]
    assert plan.dropped == (1,)
    (first, _) = sorted(scheduler.take_news(), key=lambda news: news.request_id)
    assert first.finish.error.message == "the deadline passed after 1 generated tokens"
    assert scheduler.next_deadline() == 7.0
    assert scheduler.stats().used_blocks == 1


def test_finished_requests_do_not_pile_up_among_the_deadlines():
    scheduler = Scheduler(config())
    for number in range(2_000):
        scheduler.submit(request(number, [7], deadline=1e6))
        scheduler.abort(number)
    assert len(scheduler._deadlines._heap) <= 64
    assert scheduler.next_deadline() is None


def test_queue_full_by_requests_and_by_tokens():
    scheduler = Scheduler(config(max_waiting_requests=3, max_waiting_tokens=20))
    assert scheduler.submit(request(1, [1] * 30)) is None  # an empty queue takes anything that can be served
    message = "30 prompt tokens wait already, 1 more would exceed the limit of 20"
    assert scheduler.submit(request(2, [1])) == Refusal(RefusalCode.QUEUE_FULL, message, None, 1.0)
    scheduler.abort(1)
    for number in (3, 4, 5):
        assert scheduler.submit(request(number, [1] * 5)) is None
    message = "3 requests wait already, the limit is 3"
    assert scheduler.submit(request(6, [1])) == Refusal(RefusalCode.QUEUE_FULL, message, None, 1.0)
    assert (scheduler.stats().waiting, scheduler.stats().waiting_tokens) == (3, 15)


def test_a_request_that_can_never_run_is_not_queued():
    scheduler = Scheduler(config())
    assert scheduler.submit(request(1, [1] * 48)).code is RefusalCode.INVALID
    assert scheduler.submit(request(1, [])).code is RefusalCode.INVALID
    assert not scheduler.has_work


def test_misuse_is_an_exception():
    scheduler = Scheduler(config())
    scheduler.submit(request(1, [7, 8]))
    with pytest.raises(ValueError, match="request id 1 is submitted while it is live"):
        scheduler.submit(request(1, [7]))
    with pytest.raises(ValueError, match="result of step 1, but no plan is the oldest"):
        scheduler.apply(Result(1, ()))
    plan = scheduler.plan(0.0)
    with pytest.raises(ValueError, match="result of step 7, but step 1 is the oldest"):
        scheduler.apply(Result(7, ()))
    scheduler.apply(answer(plan))
    for number in range(2, 10):
        scheduler.submit(request(number, [7]))
        scheduler.plan(0.0)
    with pytest.raises(RuntimeError, match="8 plans are in flight"):
        scheduler.plan(0.0)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_failure_ends_that_request_only(depth):
    engine = Engine(config(), depth=depth)
    items = [request(i, prompt_of(9, i), max_tokens=6, ignore_eos=True) for i in range(3)]
    for item in items:
        engine.scheduler.submit(item)
    engine.step()
    engine.step()
    engine.device.failing.add(1)
    engine.run()
    error = Refusal(RefusalCode.FAILED, "made to fail")
    assert engine.finish_of(1) == Finish(FinishReason.ERROR, 9, len(engine.tokens_of(1)), 0, error=error)
    assert len(engine.tokens_of(1)) < 6
    for item in (items[0], items[2]):
        engine.assert_as_alone(item)
    assert engine.scheduler.stats().used_blocks == 0


@pytest.mark.parametrize("stride", [1, 3, 8])
def test_news_is_merged_until_it_is_taken(stride):
    scheduler = Scheduler(config(eos_token_ids=frozenset()))
    scheduler.submit(request(1, [7, 8], max_tokens=8))
    told = []
    for number in range(1, 9):
        scheduler.apply(answer(scheduler.plan(0.0), number))
        if number % stride == 0:
            told.extend(scheduler.take_news())
    told.extend(scheduler.take_news())
    assert [token for news in told for token in news.token_ids] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert len(told) == -(-8 // stride)
    assert [news.finish for news in told[:-1]] == [None] * (len(told) - 1)
    assert told[-1].finish == Finish(FinishReason.LENGTH, 2, 8, 0)


def test_stats_count_what_happened():
    engine = Engine(config())
    engine.run(request(1, prompt_of(9), max_tokens=3, ignore_eos=True))
    engine.run(request(2, prompt_of(9), max_tokens=2, ignore_eos=True))
    stats = engine.scheduler.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (0, 0, 0)
    assert (stats.total_blocks, stats.used_blocks, stats.cached_blocks, stats.free_blocks) == (16, 0, 2, 14)
    assert (stats.prompt_tokens, stats.generated_tokens) == (10, 5)
    assert (stats.cached_tokens, stats.looked_up_tokens, stats.evictions) == (8, 18, 0)
    assert stats.finished_by_reason == {**dict.fromkeys(FinishReason, 0), FinishReason.LENGTH: 2}
    assert stats.steps == len(engine.plans)
