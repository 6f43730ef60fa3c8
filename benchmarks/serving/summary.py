"""Turns to a table: medians over rounds, and ratios to a baseline taken within each round.

Must not know: targets, files.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.serving.measures import Measures
from benchmarks.serving.rounds import Turn


@dataclass(frozen=True, slots=True)
class Figure:
    """Over the rounds; NaN when no round has it."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Row:
    """A target at one concurrency. `ratio`: its tokens per second to the baseline's of the same round."""

    target: str
    concurrency: int
    rounds: int
    errors: int
    tokens_per_s: Figure
    whole_tokens_per_s: Figure
    ratio: Figure
    ttft_p50_ms: Figure
    ttft_p99_ms: Figure
    itl_p50_ms: Figure
    itl_p99_ms: Figure
    tpot_p50_ms: Figure
    memory_gib: float


def summarise(turns: Sequence[Turn], baseline: str) -> list[Row]:
    """Rows by concurrency, then in the order in which the targets first appeared."""
    names = list(dict.fromkeys(turn.target for turn in turns))
    levels = sorted({turn.concurrency for turn in turns})
    base = {(turn.round, turn.concurrency): turn.measures.tokens_per_s for turn in turns if turn.target == baseline}
    rows = []
    for level in levels:
        for name in names:
            own = [turn for turn in turns if (turn.target, turn.concurrency) == (name, level)]
            if own:
                rows.append(_row(own, base))
    return rows


def _row(own: Sequence[Turn], base: dict[tuple[int, int], float]) -> Row:
    def over(pick: Callable[[Measures], float]) -> Figure:
        return figure([pick(turn.measures) for turn in own])

    ratios = [
        turn.measures.tokens_per_s / base[turn.round, turn.concurrency]
        for turn in own
        if base.get((turn.round, turn.concurrency))
    ]
    return Row(
        target=own[0].target,
        concurrency=own[0].concurrency,
        rounds=len(own),
        errors=sum(turn.measures.errors for turn in own),
        tokens_per_s=over(lambda m: m.tokens_per_s),
        whole_tokens_per_s=over(lambda m: m.whole_tokens_per_s),
        ratio=figure(ratios),
        ttft_p50_ms=over(lambda m: m.ttft_ms.p50),
        ttft_p99_ms=over(lambda m: m.ttft_ms.p99),
        itl_p50_ms=over(lambda m: m.itl_ms.p50),
        itl_p99_ms=over(lambda m: m.itl_ms.p99),
        tpot_p50_ms=over(lambda m: m.tpot_ms.p50),
        memory_gib=max(turn.memory_bytes for turn in own) / 2**30,
    )


def figure(values: Sequence[float]) -> Figure:
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return Figure(math.nan, math.nan, math.nan)
    return Figure(statistics.median(known), min(known), max(known))


def markdown(rows: Sequence[Row], baseline: str) -> str:
    """A table; throughput and ratio with the smallest and the largest round in brackets."""
    head = (
        "c",
        "target",
        "tokens/s",
        f"ratio to {baseline}",
        "TTFT p50 ms",
        "ITL p50 ms (least)",
        "ITL p99 ms",
        "RSS GiB",
        "errors",
    )
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    lines += ["| " + " | ".join(_cells(row)) + " |" for row in rows]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    speed, ratio, itl = row.tokens_per_s, row.ratio, row.itl_p50_ms
    return (
        str(row.concurrency),
        row.target,
        f"{speed.median:.0f} ({speed.least:.0f}-{speed.most:.0f})",
        f"{ratio.median:.2f} ({ratio.least:.2f}-{ratio.most:.2f})",
        f"{row.ttft_p50_ms.median:.0f}",
        f"{itl.median:.1f} ({itl.least:.1f})",
        f"{row.itl_p99_ms.median:.1f}",
        f"{row.memory_gib:.2f}",
        str(row.errors),
    )


def plain(value: Any) -> Any:
    """Dataclasses, tuples and NaN as what JSON knows."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
