"""Figures from the records of one closed-loop run.

Must not know: targets, how the records came about, files.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.serving.records import Record

# Requests of equal length end together: with two waves of them nearly half of the run is steady.
LEAST_STEADY_PART = 0.3


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution, milliseconds."""

    p50: float
    p90: float
    p99: float
    least: float
    mean: float


@dataclass(frozen=True, slots=True)
class Measures:
    """One run of a target at one concurrency.

    `tokens_per_s`: generated tokens over the steady window, from the first end of a request to the moment a
    client finds no more requests (so neither the start nor the tail counts); `whole_tokens_per_s`: over
    everything. TTFT: sent to first token. ITL: between two messages with tokens of one request. TPOT: (last
    token - first token) / (tokens - 1). NaN where there is nothing to say.
    """

    requests: int
    errors: int
    tokens: int
    seconds: float
    tokens_per_s: float
    whole_tokens_per_s: float
    ttft_ms: Spread
    itl_ms: Spread
    tpot_ms: Spread
    e2e_ms: Spread


def measure(records: Sequence[Record], concurrency: int) -> Measures:
    """ValueError without records."""
    if not records:
        raise ValueError("there is nothing to measure")
    good = [record for record in records if record.error is None and record.arrivals]
    begin, end = min(r.sent for r in records), max(r.end for r in records)
    tokens = sum(record.num_tokens for record in good)
    return Measures(
        requests=len(records),
        errors=len(records) - len(good),
        tokens=tokens,
        seconds=end - begin,
        tokens_per_s=_rate(good, *steady_window(records, concurrency)),
        whole_tokens_per_s=tokens / (end - begin) if end > begin else math.nan,
        ttft_ms=spread([r.arrivals[0][0] - r.sent for r in good]),
        itl_ms=spread([gap for r in good for gap in gaps(r)]),
        tpot_ms=spread([tpot for r in good if (tpot := _tpot(r)) is not None]),
        e2e_ms=spread([r.end - r.sent for r in good]),
    )


def steady_window(records: Sequence[Record], concurrency: int) -> tuple[float, float]:
    """(first end of a request, the end after which a client is idle); the whole run when that is too short a
    part of it to mean anything."""
    ends = sorted(record.end for record in records)
    whole = min(record.sent for record in records), ends[-1]
    steady = ends[0], ends[-min(concurrency, len(ends))]
    return steady if steady[1] - steady[0] >= (whole[1] - whole[0]) * LEAST_STEADY_PART else whole


def gaps(record: Record) -> list[float]:
    """Seconds between messages that follow each other."""
    times = [at for at, _ in record.arrivals]
    return [later - earlier for earlier, later in pairwise(times)]


def spread(seconds: Sequence[float]) -> Spread:
    if not seconds:
        return Spread(math.nan, math.nan, math.nan, math.nan, math.nan)
    ordered = sorted(value * 1e3 for value in seconds)
    p50, p90, p99 = (quantile(ordered, q) for q in (0.5, 0.9, 0.99))
    return Spread(p50, p90, p99, ordered[0], sum(ordered) / len(ordered))


def quantile(ordered: Sequence[float], q: float) -> float:
    """Linear between neighbours, of values in ascending order."""
    place = q * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def _rate(records: Sequence[Record], begin: float, end: float) -> float:
    """Tokens per second that arrived in (begin, end]. Messages are weighted so that each request's add up to
    the count its server gave."""
    if end <= begin:
        return math.nan
    total = 0.0
    for record in records:
        arrived = sum(count for _, count in record.arrivals)
        inside = sum(count for at, count in record.arrivals if begin < at <= end)
        total += inside * record.num_tokens / arrived
    return total / (end - begin)


def _tpot(record: Record) -> float | None:
    later = record.num_tokens - record.arrivals[0][1]
    return (record.arrivals[-1][0] - record.arrivals[0][0]) / later if later > 0 else None
