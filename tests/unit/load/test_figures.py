"""Figures from outcomes: percentiles against sorted values, counts, rates, tenants, the sample of dots."""

import math
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.load_rounds import GAP_S, round_of
from tokenwire_client.load.histogram import Histogram, merged
from tokenwire_client.load.recorder import Targets

SECONDS = st.lists(st.floats(1e-5, 3000), min_size=1, max_size=200)


def filled(values: list[float]) -> Histogram:
    histogram = Histogram()
    for value in values:
        histogram.record(value)
    return histogram


@given(SECONDS, st.sampled_from([50.0, 90.0, 99.0, 99.9, 100.0]))
def test_percentiles_are_those_of_the_sorted_values(values: list[float], percent: float) -> None:
    """The value of the nearest rank, as HdrHistogram defines it, within 0.1 % and a microsecond."""
    rank = max(1, math.floor(percent / 100 * len(values) + 0.5))
    wanted = sorted(values)[rank - 1]
    assert filled(values).percentile(percent) == pytest.approx(wanted, rel=1.1e-3, abs=1.1e-6)


@settings(max_examples=25)
@given(SECONDS, SECONDS)
def test_merged_histograms_are_the_histogram_of_all(first: list[float], second: list[float]) -> None:
    both = merged([filled(first).summary(), filled(second).summary()])
    whole = filled(first + second).summary()
    assert (both.count, both.p50, both.p999, both.most) == (whole.count, whole.p50, whole.p999, whole.most)
    assert both.mean == pytest.approx(statistics.fmean(first + second))


def test_an_empty_histogram_has_nothing_to_say() -> None:
    empty = Histogram().summary()
    assert empty.count == 0
    assert all(math.isnan(value) for value in (empty.mean, empty.p50, empty.p999, empty.most))
    assert merged([empty, empty]).count == 0


def test_times_beyond_the_range_are_kept_at_its_ends() -> None:
    found = filled([0.0, -1.0, 1e6])
    assert (found.count, found.most()) == (3, pytest.approx(3600, rel=1e-3))


def test_a_text_that_is_no_histogram_is_refused() -> None:
    damaged = filled([1.0]).summary().__class__(1, 1, 1, 1, 1, 1, 1, "nonsense")
    with pytest.raises(ValueError, match="cannot be decoded"):
        damaged.decoded()


def test_latencies_are_what_was_written_down() -> None:
    found = round_of(count=20, ttft=0.05, tokens=5)
    assert found.ttft.p50 == pytest.approx(0.05, rel=2e-3)
    assert found.itl.p99 == pytest.approx(GAP_S, rel=2e-3)
    assert found.itl.count == 20 * 4
    assert found.tpot.mean == pytest.approx(GAP_S, rel=2e-3)
    assert found.e2e.most == pytest.approx(0.05 + 4 * GAP_S, rel=2e-3)


def test_counts_rates_and_tokens() -> None:
    found = round_of(count=20, errors=10)
    assert (found.counts.intended, found.counts.ok, found.counts.errors) == (30, 20, {"http_500": 10})
    assert found.counts.good_share == pytest.approx(2 / 3)
    # The last request begins at 2.9 s; until then all that are good have ended.
    assert found.window_s == pytest.approx(2.9)
    assert found.rates.tokens == pytest.approx(20 * 5 / 2.9)
    assert found.rates.ok == pytest.approx(20 / 2.9)
    assert (found.tokens.prompt, found.tokens.cached, found.tokens.completion) == (60, 20, 100)
    assert [(tenant.name, tenant.counts.ok, tenant.counts.failed) for tenant in found.tenants] == [
        ("a", 10, 5),
        ("b", 10, 5),
    ]
    assert sum(found.series.started) == 30
    assert found.series.in_flight[-1] == 0


@pytest.mark.parametrize(
    ("targets", "good"),
    [
        (Targets(), 20),
        (Targets(ttft=0.06), 20),
        (Targets(ttft=0.04), 0),
        (Targets(tpot=0.009), 0),
        (Targets(e2e=0.1), 20),
        (Targets(ttft=0.06, e2e=0.08), 0),
    ],
)
def test_good_requests_keep_every_target(targets: Targets, good: int) -> None:
    assert round_of(targets=targets).counts.good == good


def test_dots_are_a_bounded_sample() -> None:
    found = round_of(count=5000, tokens=1)
    assert len(found.dots) == 2000
    assert statistics.fmean(at for at, _ in found.dots) == pytest.approx(250, rel=0.05)


@pytest.mark.parametrize("value", [0.0, -1.0, 1e9])
def test_what_is_no_target_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="is outside"):
        Targets(ttft=value)
