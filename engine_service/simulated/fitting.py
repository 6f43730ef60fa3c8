"""Fits a step model to measured steps.

Must not know: how they were measured.
"""

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from engine_service.simulated.step_model import StepModel, StepWork


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    work: StepWork
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """`median_error` and `worst_error` are relative to the measured time, over the steps of the fit."""

    model: StepModel
    median_error: float
    worst_error: float


def fit(steps: Sequence[MeasuredStep]) -> Fit:
    """Least squares of the relative error, no coefficient below 0. ValueError for too few steps.

    A coefficient that comes out negative is left out (set to 0) and the rest fitted again, the most negative first:
    with five of them that is the usual active-set way to non-negative least squares.
    """
    if len(steps) < 5:
        raise ValueError(f"{len(steps)} steps cannot fix 5 coefficients")
    rows = np.array([(1.0, *map(float, astuple(step.work))) for step in steps])
    seconds = np.array([step.seconds for step in steps])
    coefficients = _non_negative(rows / seconds[:, None], np.ones(len(steps)))
    model = StepModel(*coefficients)
    errors = np.abs(rows @ np.array(coefficients) - seconds) / seconds
    return Fit(model, float(np.median(errors)), float(errors.max()))


def _non_negative(matrix: np.ndarray, target: np.ndarray) -> list[float]:
    kept = list(range(matrix.shape[1]))
    scale = np.abs(matrix).max(axis=0)
    scale[scale == 0.0] = 1.0
    while True:
        solution = np.linalg.lstsq(matrix[:, kept] / scale[kept], target, rcond=None)[0]
        if len(kept) == 1 or solution.min() >= 0.0:
            break
        del kept[int(solution.argmin())]
    result = [0.0] * matrix.shape[1]
    for place, value in zip(kept, solution, strict=True):
        result[place] = max(0.0, float(value / scale[place]))
    return result
