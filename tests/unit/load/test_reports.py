"""Reports as files: JSON there and back, one page without anything to fetch, comparison."""

import json
import math
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.fixtures.load_rounds import report_of, round_of
from tokenwire_client.load.compare import compare, differences, ratio_interval
from tokenwire_client.load.console import compare_row, knee_line, step_row, summary_lines
from tokenwire_client.load.page import render
from tokenwire_client.load.results import Knee, Report, read_json, write_json

EMPTY = '{"format": "tokenwire-load/1", "kind": %s, "created": "", "settings": {}, "machine": {}, "rounds": []}'
HOSTILE = '<script src="https://evil.example/x.js">alert(1)</script>'


def a_sweep(count: int = 20, tokens: int = 5) -> Report:
    rounds = tuple(
        round_of(rate=rate, ttft=0.01 * rate, errors=int(rate > 4 or not count), count=count, tokens=tokens)
        for rate in (1.0, 2.0, 4.0, 8.0)
    )
    knee = Knee(4.0, 8.0, "as few failures as possible")
    return Report("sweep", "now", {"target": "http there"}, {}, rounds, knee)


REPORTS = {
    "run": report_of(round_of(errors=2), round_of(seed=1)),
    "sweep": a_sweep(),
    "nothing ended well": report_of(round_of(count=0, errors=3)),
    "a sweep in which nothing ended well": a_sweep(count=0),
    "a sweep of single tokens": a_sweep(tokens=1),
}


class Elements(HTMLParser):
    """Names and attributes of every element of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]


@pytest.mark.parametrize("name", REPORTS)
def test_json_there_and_back(name: str, tmp_path: Path) -> None:
    path = tmp_path / "deep" / "report.json"
    write_json(REPORTS[name], path)
    assert "NaN" not in path.read_text()
    again = read_json(path)
    write_json(again, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is no report"),
        ('{"format": "other"}', "is no report"),
        ('{"format": "tokenwire-load/1"}', "is a damaged report"),
        (EMPTY % "3", "is a damaged report: str expected, got '3'"),
        (EMPTY % '"run"', "holds no measurement"),
    ],
)
def test_what_is_no_report_is_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_json(path)


def test_a_damaged_round_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    write_json(REPORTS["run"], path)
    data = json.loads(path.read_text())
    data["rounds"][0]["counts"]["ok"] = "many"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="damaged report: int expected, got 'many'"):
        read_json(path)


@pytest.mark.parametrize("name", REPORTS)
def test_a_page_needs_nothing_from_anywhere(name: str) -> None:
    page = render(REPORTS[name])
    found = Elements(page)
    assert not {"script", "link", "img", "iframe", "object", "embed", "base"} & set(found.names)
    for attribute, value in found.attributes:
        if attribute in ("src", "href", "xlink:href", "srcset", "data", "action"):
            assert value.startswith("#"), (attribute, value)
        assert not attribute.startswith("on")
        assert "url(" not in value or "url(#" in value
    assert not re.search(r"https?://|@import", page)
    assert found.names.count("svg") >= 4


def test_what_comes_from_outside_is_escaped() -> None:
    hostile = report_of(round_of(errors=1, message=HOSTILE), target=HOSTILE, model=HOSTILE)
    page = render(hostile)
    assert "script" not in Elements(page).names
    assert HOSTILE not in page


def test_a_sweep_names_its_knee() -> None:
    page = render(a_sweep())
    assert "Knee: <b>4 requests per second</b>; 8 were too many." in page
    assert "knee: 4/s" in page
    assert knee_line(Knee(math.nan, 1.0, "all")) == "knee: no rate was sustained (all)"
    assert step_row(a_sweep().rounds[0])[0] == "1"


def test_the_summary_says_what_failed() -> None:
    text = "\n".join(summary_lines([round_of(errors=2)]))
    assert "22 intended, 20 ok, 2 errors" in text
    assert "error http_500: 2, as in: it broke" in text


def test_comparison_of_runs_with_rounds() -> None:
    a = report_of(*(round_of(seed=n, ttft=0.050 + 0.001 * n) for n in range(3)), input_tokens="100")
    b = report_of(*(round_of(seed=n, ttft=0.100 + 0.002 * n) for n in range(3)), input_tokens="200")
    (row,) = [row for row in compare(a, b) if row.name == "TTFT p50 ms"]
    assert row.ratio == pytest.approx(2, rel=0.01)
    assert row.low < 2 < row.high
    assert compare_row(row)[3] == f"{row.ratio:.3f}"
    (errors,) = [row for row in compare(a, b) if row.name == "errors"]
    assert (errors.a, errors.b) == (0, 0)
    assert differences(a, b) == ["input_tokens: 100 / 200"]


def test_comparison_of_sweeps_is_by_rate() -> None:
    rows = compare(a_sweep(), a_sweep())
    assert {row.rate for row in rows} == {1.0, 2.0, 4.0, 8.0}
    assert all(math.isnan(row.ratio) or row.ratio == pytest.approx(1) for row in rows)
    with pytest.raises(ValueError, match="a sweep and a run cannot be compared"):
        compare(a_sweep(), REPORTS["run"])
    other = Report("sweep", "now", {}, {}, (round_of(rate=3.0),), Knee(3.0, math.nan, ""))
    with pytest.raises(ValueError, match="no rate in common"):
        compare(a_sweep(), other)


def test_the_interval_of_a_ratio_is_welchs() -> None:
    """By hand: variances of the logarithms 0.02 each, so standard error sqrt(0.02), 2 degrees of freedom, t 4.303."""
    ratio, low, high = ratio_interval([1.0, math.exp(0.2)], [math.exp(1.0), math.exp(1.2)])
    half = 4.303 * math.sqrt(0.02)
    assert (ratio, low, high) == pytest.approx((math.e, math.exp(1 - half), math.exp(1 + half)))
    assert math.isnan(ratio_interval([1.0], [2.0, 3.0])[1])


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    source = random.Random(7)

    def drawn(median: float) -> list[float]:
        return [median * math.exp(source.gauss(0, 0.1)) for _ in range(4)]

    held = sum(low <= 1.5 <= high for _, low, high in (ratio_interval(drawn(1.0), drawn(1.5)) for _ in range(2000)))
    assert 0.94 <= held / 2000 <= 0.98
