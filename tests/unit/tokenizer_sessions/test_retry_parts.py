"""Retry budget, backoff, circuit breaker and ids at engines: what holds for any run of events."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer_service.engines.breaker import Breaker, BreakerLimits, BreakerState
from tokenizer_service.failover.backoff import Backoff
from tokenizer_service.failover.engine_ids import EngineIds
from tokenizer_service.failover.retry_budget import BudgetLimits, RetryBudget

CLOSED, HALF_OPEN, OPEN = BreakerState.CLOSED, BreakerState.HALF_OPEN, BreakerState.OPEN


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@settings(deadline=None)
@given(
    events=st.lists(st.one_of(st.just("earn"), st.just("spend"), st.floats(0.0, 5.0)), max_size=200),
    share=st.floats(0.0, 2.0),
    burst=st.floats(1.0, 20.0),
    per_second=st.floats(0.0, 3.0),
)
def test_never_more_retries_than_burst_share_and_time_allow(
    events: list[str | float], share: float, burst: float, per_second: float
) -> None:
    clock = Clock()
    budget = RetryBudget(BudgetLimits(share, burst, per_second), clock)
    allowed, spent = burst, 0
    for event in events:
        if event == "earn":
            budget.earn()
            allowed += share
        elif event == "spend":
            left = budget.left
            assert budget.spend() == (left >= 1.0)
            spent += left >= 1.0
        else:
            clock.now += float(event)
            allowed += float(event) * per_second
        assert spent <= allowed + 1e-6
        assert -1e-9 <= budget.left <= burst


def test_an_idle_budget_is_full_again() -> None:
    clock = Clock()
    budget = RetryBudget(BudgetLimits(share=0.5, burst=4.0, per_second=1.0), clock)
    assert [budget.spend() for _ in range(5)] == [True] * 4 + [False]
    budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
    clock.now += 1000.0
    assert budget.left == 4.0


@settings(deadline=None)
@given(
    first=st.floats(0.001, 5.0), most=st.floats(0.001, 60.0), turn=st.integers(0, 10_000), jitter=st.floats(0, 0.999)
)
def test_pauses_are_bounded_and_spread(first: float, most: float, turn: int, jitter: float) -> None:
    pause = Backoff(first, most).pause(turn, jitter)
    assert 0.0 < pause <= most
    assert pause <= first * 2.0 ** min(turn, 64)
    assert pause >= min(most, first) / 2


def new_breaker(clock: Clock) -> Breaker:
    return Breaker(BreakerLimits(failures=3, first_open_s=1.0, max_open_s=4.0), clock)


def test_three_failures_in_a_row_open_it_and_a_trial_that_succeeds_closes_it() -> None:
    clock = Clock()
    breaker = new_breaker(clock)
    for _ in range(2):
        breaker.on_failure()
        breaker.on_failure()
        assert breaker.state is CLOSED
        breaker.on_success()
    for _ in range(3):
        breaker.on_failure()
    assert (breaker.state, breaker.allows) == (OPEN, False)
    clock.now += 1.0
    assert (breaker.state, breaker.allows) == (HALF_OPEN, True)
    breaker.on_sent()
    assert breaker.state is OPEN  # one is enough to try
    breaker.on_success()
    assert (breaker.state, breaker.is_troubled) == (CLOSED, False)


def test_each_trial_that_fails_doubles_the_time_up_to_a_limit() -> None:
    clock = Clock()
    breaker = new_breaker(clock)
    breaker.trip()
    for seconds in (1.0, 2.0, 4.0, 4.0):
        clock.now += seconds - 0.01
        assert breaker.state is OPEN
        clock.now += 0.01
        assert breaker.state is HALF_OPEN
        breaker.on_sent()
        breaker.on_failure()
        assert breaker.state is OPEN
    breaker.on_success()
    breaker.trip()
    clock.now += 1.0
    assert breaker.state is HALF_OPEN


def test_many_failures_of_one_death_open_it_once() -> None:
    clock = Clock()
    breaker = new_breaker(clock)
    for _ in range(50):
        breaker.on_failure()
    clock.now += 1.0
    assert breaker.state is HALF_OPEN


def test_a_trial_of_which_nothing_is_heard_blocks_nobody_for_ever() -> None:
    clock = Clock()
    breaker = new_breaker(clock)
    breaker.trip()
    clock.now += 1.0
    breaker.on_sent()
    clock.now += 1.0
    assert breaker.allows


@settings(deadline=None)
@given(st.lists(st.sampled_from(["sent", "success", "failure", "trip", "wait"]), max_size=100))
def test_it_is_never_shut_longer_than_its_limit(events: list[str]) -> None:
    clock = Clock()
    breaker = new_breaker(clock)
    for event in events:
        if event == "wait":
            clock.now += 0.7
        elif event == "sent":
            breaker.on_sent()
        elif event == "success":
            breaker.on_success()
            assert breaker.state is CLOSED
        elif event == "failure":
            breaker.on_failure()
        else:
            breaker.trip()
            assert breaker.state is OPEN
    clock.now += 4.0
    assert breaker.allows


@pytest.mark.parametrize("failures", [1, 5])
def test_the_number_of_failures_is_a_setting(failures: int) -> None:
    breaker = Breaker(BreakerLimits(failures=failures), Clock())
    for count in range(1, failures + 1):
        assert breaker.state is CLOSED
        breaker.on_failure()
        assert (breaker.state is OPEN) == (count == failures)


@given(
    names=st.lists(st.tuples(st.booleans(), st.text("ab~-1é", max_size=300), st.booleans()), min_size=1, max_size=20)
)
def test_no_two_submissions_have_one_id_whatever_clients_call_theirs(names: list[tuple[bool, str, bool]]) -> None:
    """Also when a client takes an id that an engine knew another request by. Two services beside each other."""
    first, second = EngineIds("1"), EngineIds("2")
    made: list[str] = []
    for is_first, name, takes_known in names:
        chosen = made[-1] if takes_known and made else name
        made.append((first if is_first else second).new(chosen))
        assert len(made[-1]) <= 256
        assert chosen.startswith(made[-1].rpartition("~")[0])
    assert len(set(made)) == len(made)
