"""The step model: what it counts, what it refuses, and that a fit finds the figures that made the steps."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.plan import Chunk
from engine_service.simulated.fitting import MeasuredStep, fit
from engine_service.simulated.step_model import BadStepModel, StepModel, StepWork

MODEL = StepModel(0.01, 0.0005, 0.0006, 2e-7, 1e-7)
chunks = st.lists(st.tuples(st.integers(0, 500), st.integers(1, 40)), max_size=20)


@given(chunks)
def test_work_is_what_a_count_position_by_position_gives(pairs: list[tuple[int, int]]) -> None:
    plan = [Chunk(number, start, length, (), True) for number, (start, length) in enumerate(pairs)]
    reads = {length == 1: 0 for length in (1, 2)}
    for start, length in pairs:
        for position in range(start, start + length):
            reads[length == 1] += position + 1
    work = StepWork.of(plan)
    assert (work.decode_context, work.prefill_context) == (reads[True], reads[False])
    assert work.decode_rows == sum(length == 1 for _, length in pairs)
    assert work.prefill_tokens == sum(length for _, length in pairs if length > 1)


def test_an_empty_step_takes_no_time() -> None:
    assert MODEL.seconds(StepWork.of(())) == 0.0
    assert MODEL.seconds(StepWork(1, 0, 100, 0)) == pytest.approx(0.01 + 0.0005 + 2e-5)


def test_a_file_keeps_the_model(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "model.json", {"machine": "none"})
    assert StepModel.load(tmp_path / "model.json") == MODEL


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"step_model": 3}',
        '{"step_model": {"base_s": 1}}',
        json.dumps({"step_model": dict.fromkeys(StepModel.__slots__, 0.0)}),
        json.dumps({"step_model": dict.fromkeys(StepModel.__slots__, -1.0)}),
        json.dumps({"step_model": dict.fromkeys(StepModel.__slots__, float("nan"))}),
        json.dumps({"step_model": dict.fromkeys(StepModel.__slots__, "a")}),
        " " * 70_000,
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(BadStepModel):
        StepModel.load(tmp_path / "model.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadStepModel, match="No such file"):
        StepModel.load(tmp_path / "model.json")


works = st.builds(StepWork, st.integers(0, 64), st.integers(1, 512), st.integers(0, 50_000), st.integers(0, 200_000))


@given(st.lists(works, min_size=30, max_size=40, unique=True))
def test_a_fit_explains_steps_that_a_model_made(steps: list[StepWork]) -> None:
    found = fit([MeasuredStep(work, MODEL.seconds(work)) for work in steps])
    assert found.worst_error < 1e-6


def test_a_fit_finds_the_coefficients() -> None:
    steps = [
        StepWork(rows, prompt, rows * context, prompt * (prompt + 1) // 2)
        for rows in (1, 4, 32)
        for prompt in (0, 64, 512)
        for context in (50, 1000)
    ]
    found = fit([MeasuredStep(work, MODEL.seconds(work)) for work in steps]).model
    assert found.base_s == pytest.approx(MODEL.base_s)
    assert found.decode_row_s == pytest.approx(MODEL.decode_row_s)
    assert found.prefill_token_s == pytest.approx(MODEL.prefill_token_s)


def test_no_coefficient_is_negative() -> None:
    """More prompt tokens that take less time: the best fit without negative ones ignores them."""
    steps = [MeasuredStep(StepWork(1, prompt, 0, 0), 0.1 - prompt * 1e-4) for prompt in range(10, 200, 10)]
    found = fit(steps).model
    assert min(found.base_s, found.decode_row_s, found.prefill_token_s) >= 0.0
    assert found.prefill_token_s == 0.0


def test_a_fit_needs_steps() -> None:
    with pytest.raises(ValueError, match="4 steps"):
        fit([MeasuredStep(StepWork(1, 0, 0, 0), 0.1)] * 4)
