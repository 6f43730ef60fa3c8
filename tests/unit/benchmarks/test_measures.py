"""Figures of records, against hand-made cases and slow references. No target runs here."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving.measures import gaps, measure, quantile, steady_window
from benchmarks.serving.records import Record, from_json, to_json


def record(
    key: int,
    sent: float,
    times: list[float],
    *,
    counts: list[int] | None = None,
    tokens: int | None = None,
    error: str | None = None,
) -> Record:
    arrivals = tuple(zip(times, counts or [1] * len(times), strict=True))
    return Record(key, sent, arrivals, times[-1] if times else sent + 1.0, tokens, error)


def test_latencies_of_one_request() -> None:
    measures = measure([record(0, 10.0, [10.5, 10.6, 10.8])], 1)
    assert measures.ttft_ms.p50 == pytest.approx(500)
    assert measures.itl_ms.mean == pytest.approx(150)
    assert measures.itl_ms.least == pytest.approx(100)
    assert measures.tpot_ms.p50 == pytest.approx(150)
    assert measures.e2e_ms.p50 == pytest.approx(800)
    assert (measures.requests, measures.errors, measures.tokens) == (1, 0, 3)
    assert measures.whole_tokens_per_s == pytest.approx(3 / 0.8)


def test_several_tokens_in_a_message_count_each_for_tpot_and_once_for_itl() -> None:
    measures = measure([record(0, 0.0, [1.0, 1.3], counts=[1, 3])], 1)
    assert measures.tokens == 4
    assert measures.itl_ms.p50 == pytest.approx(300)
    assert measures.tpot_ms.p50 == pytest.approx(100)


def test_the_server_has_the_last_word_on_the_number_of_tokens() -> None:
    measures = measure([record(0, 0.0, [1.0, 2.0], tokens=8)], 1)
    assert measures.tokens == 8
    # Both messages are in the run, so together they weigh 8.
    assert measures.tokens_per_s == pytest.approx(8 / 2.0)


def test_one_token_gives_no_gap() -> None:
    measures = measure([record(0, 0.0, [1.0])], 1)
    assert math.isnan(measures.itl_ms.p50)
    assert math.isnan(measures.tpot_ms.p50)


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(record(1, 0.0, [0.5], error="refused"), id="refused after a token"),
        pytest.param(record(1, 0.0, []), id="ended without a token"),
    ],
)
def test_errors_are_counted_and_give_no_figures(bad: Record) -> None:
    measures = measure([record(0, 0.0, [1.0, 1.1]), bad], 1)
    assert (measures.requests, measures.errors, measures.tokens) == (2, 1, 2)
    assert measures.ttft_ms.p50 == pytest.approx(1000)


def test_no_records_are_no_measure() -> None:
    with pytest.raises(ValueError, match="nothing"):
        measure([], 1)


@pytest.mark.parametrize(
    ("ends", "concurrency", "window"),
    [
        pytest.param([1, 2, 3, 4, 5, 6], 2, (1, 5), id="from the first end until a client has nothing to do"),
        pytest.param([2, 2, 4, 4, 6, 6], 2, (2, 6), id="waves"),
        pytest.param([3, 6, 9], 1, (3, 9), id="one client is never idle"),
        pytest.param([4, 4.001, 8], 2, (0, 8), id="too short to mean anything"),
        pytest.param([5], 1, (0, 5), id="one request"),
        pytest.param([5, 6], 8, (0, 6), id="fewer requests than clients"),
    ],
)
def test_the_steady_window(ends: list[float], concurrency: int, window: tuple[float, float]) -> None:
    records = [record(key, 0.0, [end]) for key, end in enumerate(ends)]
    assert steady_window(records, concurrency) == window


def test_only_tokens_inside_the_steady_window_count() -> None:
    # Two clients in waves; a token every second. The window is (2, 6].
    records = [record(i, sent, [sent + 1, sent + 2]) for i, sent in enumerate([0.0, 0.0, 2.0, 2.0, 4.0, 4.0])]
    assert measure(records, 2).tokens_per_s == pytest.approx(8 / 4)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50), st.integers(1, 99))
def test_quantiles_are_those_of_the_standard_library(values: list[float], percent: int) -> None:
    expected = statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
    assert quantile(sorted(values), percent / 100) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_gaps_lie_between_messages() -> None:
    assert gaps(record(0, 0.0, [1.0, 1.5, 3.5])) == [0.5, 2.0]


@pytest.mark.parametrize(
    "original", [record(3, 0.5, [1.0, 2.0], counts=[1, 4], tokens=9), record(0, 0.0, [], error="x")]
)
def test_records_survive_json(original: Record) -> None:
    assert from_json(to_json(original)) == original
