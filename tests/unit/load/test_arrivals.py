"""Schedules against their definitions: mean, variance, order, repeatability."""

import statistics
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenwire_client.load.arrivals import ArrivalKind, Pace, scaled, schedule

DRAWN = (ArrivalKind.CONSTANT, ArrivalKind.POISSON, ArrivalKind.BURSTY)


def gaps(pace: Pace, seed: int, count: int) -> list[float]:
    return [later - earlier for earlier, later in pairwise([0.0, *islice(schedule(pace, seed), count)])]


@given(st.sampled_from(DRAWN), st.floats(0.01, 1000), st.integers(0, 99))
def test_a_schedule_never_goes_back_and_is_a_function_of_its_arguments(
    kind: ArrivalKind, rate: float, seed: int
) -> None:
    pace = Pace(kind, rate)
    times = list(islice(schedule(pace, seed), 50))
    assert times == list(islice(schedule(pace, seed), 50))
    assert times == sorted(times)
    assert times[0] >= 0


@pytest.mark.parametrize("rate", [0.5, 7.0, 300.0])
def test_constant_gaps_are_equal(rate: float) -> None:
    times = list(islice(schedule(Pace(ArrivalKind.CONSTANT, rate), 1), 100))
    assert times == [number / rate for number in range(100)]


@pytest.mark.parametrize(
    ("pace", "variation"),
    [
        (Pace(ArrivalKind.POISSON, 20.0), 1.0),
        (Pace(ArrivalKind.BURSTY, 20.0, 1.0), 1.0),
        (Pace(ArrivalKind.BURSTY, 20.0, 3.0), 3.0),
        (Pace(ArrivalKind.BURSTY, 20.0, 0.25), 0.25),
    ],
    ids=str,
)
def test_gaps_have_the_mean_and_the_deviation_of_their_pace(pace: Pace, variation: float) -> None:
    drawn = gaps(pace, 3, 40_000)
    mean = statistics.fmean(drawn)
    assert mean == pytest.approx(1 / pace.rate, rel=0.05)
    assert statistics.pstdev(drawn) / mean == pytest.approx(variation, rel=0.05)


def test_poisson_counts_have_their_mean_as_variance() -> None:
    counts = [0] * 2000
    for at in schedule(Pace(ArrivalKind.POISSON, 5.0), 11):
        if at >= len(counts):
            break
        counts[int(at)] += 1
    assert statistics.fmean(counts) == pytest.approx(5, rel=0.05)
    assert statistics.pvariance(counts) == pytest.approx(5, rel=0.1)


def test_seeds_differ() -> None:
    pace = Pace(ArrivalKind.POISSON, 1.0)
    assert next(schedule(pace, 1)) != next(schedule(pace, 2))


def test_a_trace_is_replayed_faster_or_slower() -> None:
    assert list(scaled([0.0, 1.0, 4.0], 2.0)) == [0.0, 0.5, 2.0]
    assert list(scaled([0.0, 1.0, 4.0], 0.5)) == [0.0, 2.0, 8.0]
    with pytest.raises(ValueError, match="time scale 0 is outside"):
        list(scaled([0.0], 0.0))


@pytest.mark.parametrize(
    ("kind", "rate", "burstiness", "message"),
    [
        (ArrivalKind.POISSON, 0.0, 1.0, "rate 0 is outside"),
        (ArrivalKind.POISSON, 1e9, 1.0, r"rate 1e\+09 is outside"),
        (ArrivalKind.BURSTY, 1.0, 0.0, "burstiness 0 is outside"),
        (ArrivalKind.CLOSED, 1.0, 1.0, "closed arrivals have no rate"),
    ],
)
def test_what_is_no_pace_is_refused(kind: ArrivalKind, rate: float, burstiness: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pace(kind, rate, burstiness)
