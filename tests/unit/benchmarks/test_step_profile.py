"""The profile of steps: the stopwatch, its sums, and the whole of it on a tiny model."""

import argparse
from pathlib import Path

import pytest

from benchmarks.engine.profile_steps import config_of, profile, table
from benchmarks.engine.read_speed import read_bytes_per_s
from benchmarks.engine.step_profile import PARTS, Case, StepProfiler, StepTimes
from benchmarks.engine.stopwatch import Stopwatch
from tests.fixtures.checkpoints import write_hist


class Worked:
    """Each call takes as many seconds of `clock` as it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def work(self, seconds: float) -> float:
        self.now += seconds
        if seconds < 0:
            raise ValueError("time does not go back")
        return seconds


def test_a_stopwatch_adds_up_and_begins_again() -> None:
    worked = Worked()
    watch = Stopwatch(worked.clock)
    watch.watch(worked, "work", "working")
    assert worked.work(2.0) == 2.0
    worked.work(0.5)
    assert watch.take() == {"working": 2.5}
    with pytest.raises(ValueError, match="back"):
        worked.work(-1.0)
    assert watch.take() == {"working": -1.0}
    assert watch.take() == {}
    with pytest.raises(AttributeError):
        watch.watch(worked, "rest", "resting")


def test_a_profile_takes_medians_and_the_floor_of_a_decode_step() -> None:
    steps = [
        StepTimes(2, 0, total, {"forward": total - 0.001, "plan": 0.001}, {"head": total / 2})
        for total in (0.010, 0.030, 0.020)
    ]
    result = profile(Case(2, 100), steps, bytes_per_s=1e9, weights=10**6, kv_per_token=1000, generated=100)
    assert (result.median, result.least) == (20.0, 10.0)
    assert result.parts["forward"] == pytest.approx(19.0)
    assert result.parts["other"] == pytest.approx(0.0)
    assert result.stages == {"head": 10.0}
    assert result.floor == pytest.approx(1.0 + 2 * 150 * 1e-3)
    assert "| decode 2 |" in table([result])
    with pytest.raises(ValueError, match="no step"):
        profile(Case(3), [], 1e9, 1, 1, 1)


def test_memory_can_be_read_by_one_and_two_threads() -> None:
    for threads in (1, 2):
        assert 1e8 < read_bytes_per_s(threads, repeats=1) < 1e13


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_every_part_of_a_step_is_timed(tmp_path: Path, backend: str) -> None:
    folder = write_hist(tmp_path / "model")
    cases = [Case(1, 20), Case(3, 20), Case(2, 20, prefill=64)]
    options = argparse.Namespace(model=str(folder), threads=1)
    flags = ("--backend", backend, "--num-blocks", "512", "--step-token-budget", "48", "--max-num-requests", "8")
    profiler = StepProfiler(config_of(options, flags, cases), folder)
    found = profiler.run(cases, output_tokens=12, repeats=2)
    assert [len(found[case]) for case in cases] == [2 * 11, 2 * 11, 2 * 4]
    for steps in found.values():
        for step in steps:
            # Whoever renames a part of the engine has to rename it in the profiler.
            assert set(step.parts) >= set(PARTS) - {"store"}
            assert 0 < step.parts["forward"] < step.total
            assert -1e-4 < step.other < step.total
            assert sum(step.stages.values()) <= step.parts["forward"] * 1.01
    assert (profiler.weight_bytes is not None) == (backend == "auto")
