"""Samples of one prompt: shared blocks, who leads, taking turns; and priorities."""

import pytest

from engine_service.core.outcome import RefusalCode
from engine_service.core.plan import Plan
from tests.unit.core.core_driver import Engine, config, prompt_of, request, samples

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


def admitted(engine: Engine) -> list[int]:
    return [new.request_id for plan in engine.plans for new in plan.new]


def used(engine: Engine) -> int:
    return engine.scheduler.stats().used_blocks


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(
    ("length", "shared", "copies"),
    [(1, 0, 0), (2, 0, 1), (4, 0, 1), (5, 1, 0), (6, 1, 1), (8, 1, 1), (9, 2, 0), (23, 5, 1)],
)
def test_forks_share_what_lies_before_the_last_prompt_token(length, shared, copies, prefix_cache):
    """Block size 4: full blocks before the last token are shared, the block that holds it is copied if it has more."""
    engine = Engine(config(num_blocks=32, prefill_chunk_size=16, step_token_budget=40, prefix_cache=prefix_cache))
    first, second = items = samples(1, 2, prompt_of(length), max_tokens=6, ignore_eos=True)
    engine.scheduler.submit(*items)
    while len(admitted(engine)) < 2:
        engine.step()
    assert second.block_table[:shared] == first.block_table[:shared]
    assert not set(second.block_table[shared:]) & set(first.block_table)
    plan = engine.plans[-1]
    assert plan.copies == ((first.block_table[shared], second.block_table[shared]),) * copies
    chunk = next(chunk for chunk in plan.chunks if chunk.request_id == 2)
    assert (chunk.start, chunk.length, chunk.samples) == (length - 1, 1, True)
    engine.run()
    for item in items:
        engine.assert_as_alone(item)
    assert engine.scheduler.stats().prompt_tokens == length + 1


@DEPTHS
def test_samples_wait_for_the_first_and_others_pass_them(depth):
    engine = Engine(config(num_blocks=64, prefill_chunk_size=8, max_num_requests=8), depth=depth)
    items = samples(1, 4, prompt_of(30), ignore_eos=True)
    other = request(9, prompt_of(5, 3), ignore_eos=True)
    engine.scheduler.submit(*items)
    engine.scheduler.submit(other)
    engine.step()
    assert admitted(engine) == [1, 9]
    stats = engine.scheduler.stats()
    assert (stats.running, stats.waiting, stats.waiting_tokens) == (2, 3, 90)
    engine.run()
    assert admitted(engine) == [1, 9, 2, 3, 4]
    for item in [*items, other]:
        engine.assert_as_alone(item)


@DEPTHS
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4, 8])
def test_when_the_first_ends_early_the_next_leads(steps, depth):
    """Aborted before, while and after it computes the prompt."""
    engine = Engine(config(num_blocks=64, prefill_chunk_size=8), depth=depth)
    items = samples(1, 3, prompt_of(30), max_tokens=12, ignore_eos=True)
    engine.scheduler.submit(*items)
    for _ in range(steps):
        engine.step()
    engine.scheduler.abort(1)
    engine.scheduler.check_invariants()
    engine.run()
    for item in items[1:]:
        engine.assert_as_alone(item)
    assert used(engine) == 0


def test_a_failure_ends_one_sample_only():
    engine = Engine(config(num_blocks=64))
    items = samples(1, 4, prompt_of(10), ignore_eos=True)
    engine.device.failing |= {1, 3}
    engine.scheduler.submit(*items)
    engine.run()
    assert [engine.finish_of(n).error is None for n in (1, 2, 3, 4)] == [False, True, False, True]
    for number in (1, 3):
        engine.assert_as_alone(items[number])


@DEPTHS
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_samples_are_preempted_alone(prefix_cache, depth):
    engine = Engine(config(num_blocks=14, prefix_cache=prefix_cache, max_num_requests=8), depth=depth)
    items = samples(1, 6, prompt_of(18), max_tokens=24, ignore_eos=True)
    engine.scheduler.submit(*items)
    engine.run()
    assert engine.scheduler.stats().preemptions > 0
    for item in items:
        engine.assert_as_alone(item)
    assert used(engine) == 0


def test_more_samples_than_may_run_take_turns_and_share_again():
    engine = Engine(config(num_blocks=32, max_num_requests=3, prefix_cache=False))
    items = samples(1, 10, prompt_of(9), max_tokens=5, ignore_eos=True)
    engine.scheduler.submit(*items)
    engine.run()
    assert admitted(engine) == list(range(1, 11))
    for item in items:
        engine.assert_as_alone(item)


def test_usage_of_samples_is_that_of_the_first():
    """Its cached prompt tokens are theirs; the totals count a prompt that was looked up once."""
    engine = Engine(config(num_blocks=64))
    engine.run(request(100, prompt_of(21), max_tokens=1))
    items = samples(1, 3, prompt_of(21), max_tokens=2, ignore_eos=True)
    engine.scheduler.submit(*items)
    engine.run()
    assert [engine.finish_of(n).cached_tokens for n in (1, 2, 3)] == [20, 20, 20]
    stats = engine.scheduler.stats()
    assert (stats.cached_tokens, stats.looked_up_tokens) == (20, 42)


def test_completions_of_samples_are_cached_apart():
    """Each sample's own blocks can be found again by a prompt that repeats its text."""
    engine = Engine(config(num_blocks=64))
    items = samples(1, 3, prompt_of(10), max_tokens=11, ignore_eos=True)
    engine.scheduler.submit(*items)
    engine.run()
    for number, item in enumerate(items, start=50):
        engine.run(request(number, [*item.token_ids, 3], max_tokens=1))
        assert engine.finish_of(number).cached_tokens == 20


def test_the_queue_takes_all_samples_or_none():
    engine = Engine(config(max_waiting_requests=6, max_waiting_tokens=100))
    assert engine.scheduler.submit(*samples(1, 4, prompt_of(10))) is None
    refusal = engine.scheduler.submit(*samples(11, 3, prompt_of(10)))
    assert refusal.code is RefusalCode.QUEUE_FULL
    assert all(number in refusal.message for number in ("4", "3", "6"))
    refusal = engine.scheduler.submit(*samples(11, 2, prompt_of(31)))
    assert refusal.code is RefusalCode.QUEUE_FULL
    assert all(number in refusal.message for number in ("40", "62", "100"))
    assert engine.scheduler.stats().waiting == 4
    assert engine.scheduler.submit(*samples(11, 2, prompt_of(30))) is None
    engine.run()
    refusal = engine.scheduler.submit(*samples(21, 7, prompt_of(1)))
    assert (refusal.code, refusal.field) == (RefusalCode.INVALID, "request.sampling.n"), "never, not later"
    assert all(number in refusal.message for number in ("7", "6"))


def test_a_live_id_among_samples_is_a_bug_of_the_caller():
    engine = Engine(config())
    engine.scheduler.submit(request(2, [1]))
    with pytest.raises(ValueError, match="request id 2"):
        engine.scheduler.submit(*samples(1, 3, [1]))
    assert engine.scheduler.stats().waiting == 1


def test_order_is_by_priority_then_arrival():
    engine = Engine(config(max_num_requests=1))
    items = [request(n, [n], max_tokens=1, priority=p) for n, p in enumerate([0, 3, -2, 0, 3, -2, 2**31 - 1], start=1)]
    engine.run(*items)
    assert admitted(engine) == [3, 6, 1, 4, 2, 5, 7]


@DEPTHS
def test_the_worst_priority_is_preempted_first(depth):
    """The early request of low priority gives its blocks to later ones of a better priority."""
    engine = Engine(config(num_blocks=12, max_num_requests=3, prefix_cache=False), depth=depth)
    low = request(1, prompt_of(6), max_tokens=30, priority=1, ignore_eos=True)
    others = [request(n, prompt_of(6, n), max_tokens=30, ignore_eos=True) for n in (2, 3)]
    engine.run(low, *others)
    preempted = [number for plan in engine.plans for number in _preempted(plan, engine.plans)]
    assert preempted
    assert preempted[0] == 1
    for item in (low, *others):
        engine.assert_as_alone(item)


def _preempted(plan: Plan, plans: list[Plan]) -> list[int]:
    """Requests that a plan drops and a later one takes in again."""
    later = {new.request_id for other in plans if other.step >= plan.step for new in other.new}
    return [number for number in plan.dropped if number in later]


def test_a_preempted_request_waits_behind_a_better_priority_and_before_its_own():
    engine = Engine(config(num_blocks=12, max_num_requests=2, prefix_cache=False))
    runners = [request(n, prompt_of(10, n), max_tokens=30, ignore_eos=True) for n in (1, 2)]
    for item in runners:
        engine.scheduler.submit(item)
    while engine.scheduler.stats().preemptions == 0:
        engine.step()
    better = request(7, prompt_of(12, 7), max_tokens=2, priority=-1, ignore_eos=True)
    equal = request(8, prompt_of(1, 8), max_tokens=2, arrival=0.5, ignore_eos=True)
    engine.scheduler.submit(equal)
    engine.scheduler.submit(better)
    before = len(engine.plans)
    assert [item.request_id for item in engine.scheduler._roster.waiting.all()] == [7, 2, 8]
    engine.run()
    again = [new.request_id for plan in engine.plans[before:] for new in plan.new]
    assert again[0] in (7, 8)  # the preempted one needs more blocks than are free
    for item in (*runners, better, equal):
        engine.assert_as_alone(item)


def test_a_passed_request_of_low_priority_is_not_passed_for_ever_by_its_own():
    """The bound on passing counts later requests; a better priority is earlier and does not count."""
    engine = Engine(config(num_blocks=12, max_model_len=49, max_waiting_requests=400))
    big = request(1_000, prompt_of(40, 2), max_tokens=4, ignore_eos=True, priority=5, arrival=2.5)
    for number in range(150):
        engine.scheduler.submit(
            request(number, prompt_of(6, number), max_tokens=5, ignore_eos=True, priority=5 - (number % 5 == 0))
        )
        if number == 2:
            engine.scheduler.submit(big)
        engine.step()
    engine.run()
    order = admitted(engine)
    passed = [number for number in order[: order.index(1_000)] if number > 2 and number % 5]
    assert len(passed) <= 16
    engine.assert_as_alone(big)
