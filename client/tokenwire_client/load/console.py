"""What `tokenwire load` prints at the end: a few lines, a table.

Must not know: pages, how figures were measured.
"""

import math
from collections.abc import Sequence

from tokenwire_client.load.compare import Row
from tokenwire_client.load.histogram import merged
from tokenwire_client.load.results import Knee, Round

STEP_HEADS = ("offered/s", "ok/s", "good/s", "good", "tokens/s", "TTFT p50 ms", "p99", "TPOT p50 ms", "p99", "bad")
COMPARE_HEADS = ("figure", "A", "B", "B / A", "95 % interval")


def summary_lines(rounds: Sequence[Round]) -> list[str]:
    """Of a run: counts of all rounds, medians over rounds for rates, all values for latencies."""
    counts = [each.counts for each in rounds]
    errors = sum(each.failed for each in counts)
    lines = [
        f"requests: {sum(c.intended for c in counts)} intended, {sum(c.ok for c in counts)} ok, {errors} errors, "
        f"{sum(c.cancelled for c in counts)} cancelled, {sum(c.abandoned for c in counts)} abandoned, "
        f"{sum(c.not_sent for c in counts)} not sent",
        f"rates: {_middle([each.rates.ok for each in rounds]):.2f} ok/s, "
        f"{_middle([each.rates.good for each in rounds]):.2f} good/s, "
        f"{_middle([each.rates.tokens for each in rounds]):.1f} tokens/s",
    ]
    for name, parts in (
        ("TTFT", [each.ttft for each in rounds]),
        ("ITL", [each.itl for each in rounds]),
        ("TPOT", [each.tpot for each in rounds]),
        ("end to end", [each.e2e for each in rounds]),
    ):
        all_of = merged(parts)
        values = (all_of.p50, all_of.p90, all_of.p99, all_of.p999)
        shown = "  ".join(f"{label} {_ms(v)}" for label, v in zip(("p50", "p90", "p99", "p99.9"), values, strict=True))
        lines.append(f"{name} ms: {shown}")
    return [*lines, *_problems(rounds)]


def step_row(each: Round) -> tuple[str, ...]:
    """A rate of a sweep, for STEP_HEADS."""
    counts = each.counts
    return (
        f"{each.rate:g}",
        f"{each.rates.ok:.2f}",
        f"{each.rates.good:.2f}",
        "-" if math.isnan(counts.good_share) else f"{counts.good_share:.1%}",
        f"{each.rates.tokens:.0f}",
        *map(_ms, (each.ttft.p50, each.ttft.p99, each.tpot.p50, each.tpot.p99)),
        str(counts.failed + counts.abandoned + counts.not_sent),
    )


def knee_line(knee: Knee) -> str:
    if math.isnan(knee.rate):
        return f"knee: no rate was sustained ({knee.rule})"
    above = "" if math.isnan(knee.first_failed) else f", {knee.first_failed:g} were too many"
    return f"knee: {knee.rate:g} requests/s{above} ({knee.rule})"


def compare_row(row: Row) -> tuple[str, ...]:
    """For COMPARE_HEADS."""
    name = row.name if math.isnan(row.rate) else f"{row.rate:g}/s {row.name}"
    interval = "-" if math.isnan(row.low) else f"{row.low:.3f} to {row.high:.3f}"
    return (name, _plain(row.a), _plain(row.b), "-" if math.isnan(row.ratio) else f"{row.ratio:.3f}", interval)


def _problems(rounds: Sequence[Round]) -> list[str]:
    lines = []
    for each in rounds:
        for status, number in sorted(each.counts.errors.items()):
            lines.append(f"error {status}: {number}, as in: {each.error_examples.get(status, '')[:160]}")
    return [*lines, *dict.fromkeys(f"note: {note}" for each in rounds for note in each.notes)]


def _middle(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.1f}"


def _plain(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4g}"
