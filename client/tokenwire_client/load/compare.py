"""Two reports side by side: ratios B / A, with a confidence interval where both have several rounds.

Must not know: files, how tables look.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenwire_client.load.results import Report, Round

Pick = Callable[[Round], float]
# Two-sided 95 % quantiles of Student's t for 1, 2, ... degrees of freedom; beyond them the normal distribution's.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
_T95_MORE = ((20, 2.086), (30, 2.042), (60, 2.000))
_Z95 = 1.960

FIGURES: tuple[tuple[str, str, float, Pick], ...] = (
    ("requests/s", "", 1, lambda each: each.rates.ok),
    ("good requests/s", "", 1, lambda each: each.rates.good),
    ("tokens/s", "", 1, lambda each: each.rates.tokens),
    ("TTFT p50", "ms", 1e3, lambda each: each.ttft.p50),
    ("TTFT p99", "ms", 1e3, lambda each: each.ttft.p99),
    ("ITL p50", "ms", 1e3, lambda each: each.itl.p50),
    ("ITL p99", "ms", 1e3, lambda each: each.itl.p99),
    ("TPOT p50", "ms", 1e3, lambda each: each.tpot.p50),
    ("TPOT p99", "ms", 1e3, lambda each: each.tpot.p99),
    ("end to end p50", "ms", 1e3, lambda each: each.e2e.p50),
    ("end to end p99", "ms", 1e3, lambda each: each.e2e.p99),
    ("errors", "", 1, lambda each: float(each.counts.failed + each.counts.not_sent + each.counts.abandoned)),
)


@dataclass(frozen=True, slots=True)
class Row:
    """A figure of both: geometric means over rounds (`unit` applied), their ratio, its 95 % interval (NaN: unknown)."""

    rate: float
    name: str
    a: float
    b: float
    ratio: float
    low: float
    high: float


def compare(a: Report, b: Report) -> list[Row]:
    """Of sweeps: at each rate that both have. Raises ValueError when there is nothing in common."""
    if (a.kind == "sweep") != (b.kind == "sweep"):
        raise ValueError(f"a {a.kind} and a {b.kind} cannot be compared")
    if a.kind != "sweep":
        return _rows(math.nan, a.rounds, b.rounds)
    rates = sorted({each.rate for each in a.rounds} & {each.rate for each in b.rounds})
    if not rates:
        raise ValueError("the sweeps have no rate in common; give both the same rates")
    rows = []
    for rate in rates:
        rows += _rows(rate, [r for r in a.rounds if r.rate == rate], [r for r in b.rounds if r.rate == rate])
    return rows


def differences(a: Report, b: Report) -> list[str]:
    """Settings that are not the same, apart from the target."""
    names = sorted((a.settings.keys() | b.settings.keys()) - {"target", "model"})
    return [
        f"{name}: {a.settings.get(name, '-')} / {b.settings.get(name, '-')}"
        for name in names
        if a.settings.get(name) != b.settings.get(name)
    ]


def _rows(rate: float, a: Sequence[Round], b: Sequence[Round]) -> list[Row]:
    return [_row(rate, f"{name} {unit}".strip(), scale, pick, a, b) for name, unit, scale, pick in FIGURES]


def _row(rate: float, name: str, scale: float, pick: Pick, a: Sequence[Round], b: Sequence[Round]) -> Row:
    first, second = [pick(each) for each in a], [pick(each) for each in b]
    if min(first + second) > 0:
        ratio, low, high = ratio_interval(first, second)
        return Row(
            rate,
            name,
            statistics.geometric_mean(first) * scale,
            statistics.geometric_mean(second) * scale,
            ratio,
            low,
            high,
        )
    left, right = statistics.fmean(first) * scale, statistics.fmean(second) * scale
    return Row(rate, name, left, right, right / left if left else math.nan, math.nan, math.nan)


def ratio_interval(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Ratio of the geometric means b / a and its 95 % interval by Welch's t-test on the logarithms.

    All values must be positive. The interval is NaN unless both have at least two.
    """
    left, right = [math.log(value) for value in a], [math.log(value) for value in b]
    middle = statistics.fmean(right) - statistics.fmean(left)
    if len(left) < 2 or len(right) < 2:
        return math.exp(middle), math.nan, math.nan
    parts = [(statistics.variance(each) / len(each), len(each) - 1) for each in (left, right)]
    variance = sum(part for part, _ in parts)
    if variance == 0:
        return math.exp(middle), math.exp(middle), math.exp(middle)
    freedom = variance**2 / sum(part**2 / count for part, count in parts)
    half = _t95(freedom) * math.sqrt(variance)
    return math.exp(middle), math.exp(middle - half), math.exp(middle + half)


def _t95(freedom: float) -> float:
    """Never too small: for freedoms between two of the table the lower one's."""
    whole = math.floor(freedom + 1e-9)
    if whole <= len(_T95):
        return _T95[max(whole, 1) - 1]
    known = [(len(_T95), _T95[-1]), *_T95_MORE]
    return [value for least, value in known if least <= whole][-1] if whole < 120 else _Z95
