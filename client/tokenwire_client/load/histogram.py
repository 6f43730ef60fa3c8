"""Durations in HDR histograms: 1 microsecond to 1 hour at three significant digits, so any percentile is good to 0.1 %.

Must not know: what is measured.
"""

import math
from dataclasses import dataclass
from typing import Any

from hdrh.histogram import HdrHistogram

_LEAST_US = 1
_MOST_US = 3_600_000_000
_DIGITS = 3


class Histogram:
    """Seconds. What is beyond an hour counts as an hour."""

    def __init__(self) -> None:
        self._counts = HdrHistogram(_LEAST_US, _MOST_US, _DIGITS)
        self._total = 0.0

    def record(self, seconds: float, count: int = 1) -> None:
        micros = min(_MOST_US, max(_LEAST_US, round(seconds * 1e6)))
        self._counts.record_value(micros, count)
        self._total += seconds * count

    def add(self, other: "Histogram") -> None:
        self._counts.add(other._counts)
        self._total += other._total

    @property
    def count(self) -> int:
        return int(self._counts.get_total_count())

    @property
    def mean(self) -> float:
        return self._total / self.count if self.count else math.nan

    def percentile(self, percent: float) -> float:
        """NaN without values."""
        return self._counts.get_value_at_percentile(percent) / 1e6 if self.count else math.nan

    def most(self) -> float:
        return self._counts.get_max_value() / 1e6 if self.count else math.nan

    def summary(self) -> "Latency":
        return Latency(
            count=self.count,
            mean=self.mean,
            p50=self.percentile(50),
            p90=self.percentile(90),
            p99=self.percentile(99),
            p999=self.percentile(99.9),
            most=self.most(),
            histogram=self._counts.encode().decode() if self.count else "",
        )


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution in seconds, NaN where there is none. `histogram` is HdrHistogram's text form (microseconds)."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    p999: float
    most: float
    histogram: str

    def decoded(self) -> Histogram:
        """The distribution itself. Raises ValueError for text that is no histogram."""
        found = Histogram()
        if self.histogram:
            try:
                counts: Any = HdrHistogram.decode(self.histogram)
            except Exception as error:  # the decoder raises whatever zlib, base64 or ctypes raise
                raise ValueError("a histogram cannot be decoded") from error
            found._counts.add(counts)
            found._total = self.mean * self.count
        return found


def merged(parts: "list[Latency]") -> Latency:
    """All values of several distributions."""
    total = Histogram()
    for part in parts:
        total.add(part.decoded())
    return total.summary()
