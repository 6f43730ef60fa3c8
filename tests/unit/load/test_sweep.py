"""The search for the knee, against servers whose capacity is known."""

import asyncio
import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fixtures.load_rounds import round_of
from tokenwire_client.load.recorder import Targets
from tokenwire_client.load.results import Knee, Round
from tokenwire_client.load.sweep import Plan, Rule, sweep

STEADY = round_of(count=100, tokens=1, ttft=0.01)


def served(rate: float, capacity: float) -> Round:
    """What a server of that capacity does at a rate: what is beyond it does not end in the window."""
    rates = dataclasses.replace(STEADY.rates, offered=rate, ok=min(rate, capacity))
    return dataclasses.replace(STEADY, rate=rate, rates=rates)


def searched(plan: Plan, rule: Rule, capacity: float) -> tuple[list[Round], Knee]:
    async def measure(rate: float) -> Round:
        return served(rate, capacity)

    return asyncio.run(sweep(plan, rule, measure))


@given(st.floats(0.2, 900), st.floats(1.2, 5), st.integers(0, 6), st.floats(0.5, 20))
def test_the_knee_is_found_within_the_precision_asked_for(
    capacity: float, factor: float, refine: int, first: float
) -> None:
    rule = Rule(by_goodput=False, kept_share=1.0)
    found, knee = searched(Plan(first, factor, 1024.0, refine), rule, capacity)
    rates = [each.rate for each in found]
    assert rates == sorted(rates)
    if not math.isnan(knee.rate):
        assert knee.rate <= capacity < knee.first_failed
    if not math.isnan(knee.rate) and capacity >= first:
        # Rates are rounded to three digits, so a halving may miss the middle by half a percent.
        assert knee.first_failed / knee.rate <= factor ** (0.5**refine) * 1.02


def test_a_server_that_is_never_too_slow() -> None:
    found, knee = searched(Plan(1, 2, 16, 3), Rule(by_goodput=False), 1000)
    assert [each.rate for each in found] == [1, 2, 4, 8, 16]
    assert knee.rate == 16
    assert math.isnan(knee.first_failed)


def test_a_server_that_is_too_slow_for_the_first_rate_is_tried_below_it() -> None:
    found, knee = searched(Plan(8, 2, 100, 4), Rule(by_goodput=False), 5)
    assert found[0].rate < 5
    assert knee.rate <= 5 / 0.9
    assert found[-1].rate == 8


def test_given_rates_are_all_tried() -> None:
    found, knee = searched(Plan(rates=(8, 1, 4)), Rule(by_goodput=False), 3)
    assert [each.rate for each in found] == [1, 4, 8]
    assert (knee.rate, knee.first_failed) == (1, 4)


def test_a_rate_beyond_one_that_failed_is_no_knee() -> None:
    """Luck at a higher rate does not count."""

    async def measure(rate: float) -> Round:
        return served(rate, 100 if rate != 2 else 1)

    _, knee = asyncio.run(sweep(Plan(rates=(1, 2, 4)), Rule(by_goodput=False), measure))
    assert (knee.rate, knee.first_failed) == (1, 2)


def test_goodput_decides_where_there_are_targets() -> None:
    rule = Rule(by_goodput=True, good_share=0.9)
    slow = round_of(rate=1, ttft=0.2, targets=Targets(ttft=0.1))
    fast = round_of(rate=1, ttft=0.05, targets=Targets(ttft=0.1))
    assert (rule.holds(fast), rule.holds(slow)) == (True, False)
    assert "90% of the requests within the targets" in rule.words()


def test_failures_and_unsent_requests_are_never_sustained_without_targets() -> None:
    rule = Rule(by_goodput=False)
    assert rule.holds(served(5, 5))
    unsent = dataclasses.replace(STEADY.counts, not_sent=1)
    assert not rule.holds(dataclasses.replace(served(5, 5), counts=unsent))
    failing = dataclasses.replace(STEADY.counts, errors={"http_500": 1})
    assert not rule.holds(dataclasses.replace(served(5, 5), counts=failing))


def test_an_interrupted_sweep_keeps_what_it_has() -> None:
    async def measure(rate: float) -> Round:
        return dataclasses.replace(served(rate, 100), interrupted=rate == 4)

    found, knee = asyncio.run(sweep(Plan(1, 2, 64, 3), Rule(by_goodput=False), measure))
    assert [each.rate for each in found] == [1, 2, 4]
    assert knee.rate == 2


@pytest.mark.parametrize(
    "plan",
    [
        {"first": 0.0},
        {"first": 5.0, "most": 4.0},
        {"factor": 1.0},
        {"refine": -1},
        {"rates": (1.0, 0.0)},
        {"rates": (1.0, math.nan)},
        {"rates": (1.0, 200_000.0)},
        {"most": math.inf},
    ],
)
def test_what_is_no_plan_is_refused(plan: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"rates|factor"):
        Plan(**plan)  # type: ignore[arg-type]


@pytest.mark.parametrize(("count", "is_doubted"), [(19, True), (20, False), (400, False)])
def test_a_rate_with_few_requests_says_so(count: int, is_doubted: bool) -> None:
    async def measure(rate: float) -> Round:
        return round_of(rate=rate, count=count, ttft=0.05, targets=Targets(ttft=0.1))

    found, knee = asyncio.run(sweep(Plan(rates=(1,)), Rule(by_goodput=True, good_share=0.95), measure))
    assert knee.rate == 1
    assert found[0].notes == (
        (f"Of {count} requests a single one decides: a longer duration would tell more.",) * is_doubted
    )
