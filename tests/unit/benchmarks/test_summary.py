"""Medians over rounds, ratios within a round, tables, JSON, the picture."""

import dataclasses
import json
import math
from pathlib import Path

import pytest

from benchmarks.serving.check_tools import Finding
from benchmarks.serving.measures import measure
from benchmarks.serving.picture import draw
from benchmarks.serving.records import Record
from benchmarks.serving.rounds import Turn, describe
from benchmarks.serving.summary import Row, markdown, plain, summarise


def turn(target: str, number: int, tokens_per_s: float, concurrency: int = 1, error: str | None = None) -> Turn:
    """One request of ten tokens at that speed."""
    times = [(step + 1) / tokens_per_s for step in range(10)]
    records = [Record(0, 0.0, tuple((at, 1) for at in times), times[-1])]
    if error is not None:
        records.append(Record(1, 0.0, (), 0.1, None, error))
    return Turn(target, number, concurrency, 0.25, 2**30, measure(records, concurrency), error)


SPEEDS = {"ours": [200.0, 90.0, 400.0], "peer": [100.0, 50.0, 100.0]}
TURNS = [turn(name, number, speed) for name, speeds in SPEEDS.items() for number, speed in enumerate(speeds)]


def test_a_ratio_is_taken_within_its_round() -> None:
    ours, peer = summarise(TURNS, "peer")
    assert (ours.tokens_per_s.median, ours.tokens_per_s.least, ours.tokens_per_s.most) == pytest.approx((200, 90, 400))
    assert (ours.ratio.median, ours.ratio.least, ours.ratio.most) == pytest.approx((2.0, 1.8, 4.0))
    assert (peer.ratio.least, peer.ratio.most) == (1.0, 1.0)
    assert ours.itl_p50_ms.median == pytest.approx(5.0)
    assert (ours.rounds, ours.errors, ours.memory_gib) == (3, 0, 1.0)


def test_without_its_baseline_a_row_has_no_ratio() -> None:
    (row,) = summarise([turn("ours", 0, 10.0)], "peer")
    assert math.isnan(row.ratio.median)


def test_rows_are_ordered_by_concurrency() -> None:
    turns = [turn("a", 0, 1.0, 8), turn("b", 0, 1.0, 8), turn("a", 0, 1.0, 1), turn("b", 0, 1.0, 1)]
    assert [(row.concurrency, row.target) for row in summarise(turns, "b")] == [(1, "a"), (1, "b"), (8, "a"), (8, "b")]


def test_errors_show_in_row_table_and_line() -> None:
    failed = turn("ours", 0, 10.0, error="HTTP 500: no")
    (row,) = summarise([failed], "ours")
    assert row.errors == 1
    assert markdown([row], "ours").splitlines()[-1].endswith("| 1 |")
    assert "1 ERRORS: HTTP 500: no" in describe(failed)


def test_the_table_has_a_line_a_row() -> None:
    head, rule, ours, peer = markdown(summarise(TURNS, "peer"), "peer").splitlines()
    assert head.count("|") == rule.count("|") == ours.count("|") == peer.count("|")
    assert "200 (90-400) | 2.00 (1.80-4.00)" in ours


def test_results_are_strict_json() -> None:
    rows = summarise([turn("ours", 0, 10.0)], "nothing")
    text = json.dumps(plain({"rows": rows, "turns": TURNS, 3: (1, math.inf)}), allow_nan=False)
    read = json.loads(text)
    assert read["rows"][0]["ratio"]["median"] is None
    assert set(read["rows"][0]) == {item.name for item in dataclasses.fields(Row)}
    assert read["3"] == [1, None]


def test_the_picture_is_drawn_even_with_a_target_missing_at_a_concurrency(tmp_path: Path) -> None:
    rows = summarise([*TURNS, turn("ours", 0, 10.0, concurrency=8)], "peer")
    draw(rows, "a title", tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("value", "limit", "is_floor", "holds"),
    [
        (1.0, 1.0, False, True),
        (1.1, 1.0, False, False),
        (0.6, 0.6, True, True),
        (0.5, 0.6, True, False),
        (math.nan, 1.0, False, False),
        (math.nan, 1.0, True, False),
    ],
)
def test_a_finding_holds_or_is_missed(value: float, limit: float, is_floor: bool, holds: bool) -> None:
    finding = Finding("speed", value, limit, "ms", is_floor=is_floor)
    assert finding.holds is holds
    assert finding.line().startswith("ok " if holds else "MISSED ")
