"""What is learnt of step times: from noisy steps, while the speed of the engine moves."""

import random
from math import exp

import pytest

from engine_service.core.row_costs import DOUBTED_AFTER, FORGOTTEN_AFTER, RowCosts


def seconds(rows: int) -> float:
    """Level up to 8 rows, then in proportion."""
    return 0.010 * max(1.0, rows / 8)


def test_nothing_known() -> None:
    curve = RowCosts().curve()
    assert curve.time(1) == curve.time(1000) == 1.0
    assert curve.most_rows(1) == 4
    assert curve.most_rows(10) == 20


def test_sizes_are_tried_step_by_step() -> None:
    costs = RowCosts()
    sizes = []
    for _ in range(6):
        rows = costs.curve().most_rows(1)
        sizes.append(rows)
        costs.observe(rows, seconds(rows))
    assert sizes == [4, 8, 16, 32, 64, 128]


@pytest.mark.parametrize("drift", [0.0, 0.001, -0.0005])
def test_ratios_are_learnt_while_the_speed_moves(drift: float) -> None:
    """Contexts grow, neighbours come: each step is a little slower, and every fiftieth takes ten times as long."""
    costs, draw = RowCosts(), random.Random(1)
    for step in range(2000):
        rows = draw.choice([1, 1, 1, 2, 4, 8, 16, 32])
        noise = exp(draw.gauss(0.0, 0.1)) * (10.0 if step % 50 == 49 else 1.0)
        costs.observe(rows, seconds(rows) * noise * exp(drift * step))
    curve = costs.curve()
    for rows in (2, 4, 8, 12, 16, 24, 32):
        assert curve.time(rows) / curve.time(1) == pytest.approx(seconds(rows) / seconds(1), rel=0.25), rows


def test_a_bad_moment_is_doubted_and_forgotten() -> None:
    """A size that took long is tried again soon; what was seen often is doubted later."""
    costs = RowCosts()
    costs.observe(1, 0.010)
    costs.observe(4, 1.0)
    assert costs.curve().time(4) > 50 * costs.curve().time(1)
    for _ in range(DOUBTED_AFTER + 1):
        costs.observe(1, 0.010)
    assert costs.curve().time(4) == costs.curve().time(1)
    for _ in range(30):
        costs.observe(4, 0.011)
    for _ in range(FORGOTTEN_AFTER // 2):
        costs.observe(1, 0.010)
    assert costs.curve().time(4) == pytest.approx(1.1 * costs.curve().time(1), rel=0.3)
    for _ in range(FORGOTTEN_AFTER // 2 + 1):
        costs.observe(1, 0.010)
    assert costs.curve().time(4) == costs.curve().time(1)


def test_a_step_without_time_says_nothing() -> None:
    costs = RowCosts()
    costs.observe(1, 0.0)
    assert costs.curve().time(5) == 1.0
