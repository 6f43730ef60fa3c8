"""How long a decode step takes by its number of rows, learnt from the steps themselves.

A device takes about as long for one row as for some, and then in proportion: where that begins, the steps tell. Sizes
are kept in classes, each as a factor on the engine's present speed: that moves with contexts and neighbours, the
factors hardly. Must not know: the clock, requests, what the rows are for.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

CLASS_BOUNDS = tuple(sorted({size for power in range(20) for size in (1 << power, 3 << power >> 1)} - {0}))
"""The largest size of each class: 1, 2, 3, 4, 6, 8, 12, ..."""

SPEED_SMOOTHING = 0.1
FACTOR_SMOOTHING = 0.05
MOST_ERROR = log(2.0)
"""A step that took longer than twice the expected time counts as one that took twice as long."""

FORGOTTEN_AFTER = 512
DOUBTED_AFTER = 32
"""Steps after which a size that was not seen again is tried again: so many for each time that it was seen, and
FORGOTTEN_AFTER at most. So a bad moment does not last."""

CERTAIN = 4
"""Until a size was seen so many times its shortest step counts: steps take too long by accident, never too short."""

LEAST_TRIED = 4
"""Rows that may be tried whatever is known; then twice as many as are known."""


@dataclass(slots=True)
class _Size:
    rows: float
    factor: float  # logarithm
    seen: int
    last_step: int


class RowCosts:
    """`observe` is for steps that only decode."""

    def __init__(self) -> None:
        self._speed = 0.0  # logarithm of seconds
        self._sizes: dict[int, _Size] = {}
        self._step = 0

    def observe(self, rows: int, seconds: float) -> None:
        if seconds <= 0.0:
            return
        self._step += 1
        time, number = log(seconds), bisect_left(CLASS_BOUNDS, rows)
        if not self._sizes:
            self._speed = time
        size = self._sizes.get(number)
        if size is None or self._step - size.last_step > FORGOTTEN_AFTER:
            self._sizes[number] = _Size(rows, time - self._speed, 1, self._step)
            return
        error = time - self._speed - size.factor
        size.seen += 1
        size.last_step = self._step
        size.rows += (rows - size.rows) * SPEED_SMOOTHING
        if size.seen <= CERTAIN:
            size.factor += min(0.0, error)
            return
        error = max(-MOST_ERROR, min(MOST_ERROR, error))
        size.factor += error * FACTOR_SMOOTHING
        self._speed += error * SPEED_SMOOTHING

    def curve(self) -> "CostCurve":
        """What is known now."""
        known = sorted((size.rows, size.factor) for size in self._sizes.values() if self._is_trusted(size))
        return CostCurve([rows for rows, _ in known], [exp(factor) for _, factor in known])

    def _is_trusted(self, size: _Size) -> bool:
        return self._step - size.last_step <= min(FORGOTTEN_AFTER, DOUBTED_AFTER * size.seen)


class CostCurve:
    """Times of steps relative to each other, linear between the known sizes and level beyond them."""

    def __init__(self, rows: Sequence[float], times: Sequence[float]) -> None:
        self._rows = rows
        self._times = times

    def most_rows(self, rows: int) -> int:
        """So large a step may be tried where `rows` are to be computed in any case."""
        largest = self._rows[-1] if self._rows else 0.0
        return max(LEAST_TRIED, 2 * rows, int(2 * largest))

    def time(self, rows: int) -> float:
        """Of a step with so many rows; 1 if nothing is known."""
        known, times = self._rows, self._times
        if not known:
            return 1.0
        right = bisect_left(known, rows)
        if right == 0:
            return times[0]
        if right == len(known):
            return times[-1]
        low, high = known[right - 1], known[right]
        return times[right - 1] + (times[right] - times[right - 1]) * (rows - low) / (high - low)
