"""What the check found, as text and as JSON.

Must not know: how it was found.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.device_tests import DeviceTests
from benchmarks.gpu.equality import Equality
from benchmarks.gpu.speed import Timing


@dataclass(frozen=True, slots=True)
class Report:
    """`attention`: the kernel that serves, and, for each that was preferred to it, why not."""

    device: str
    torch: str
    attention: str
    passed_over: Sequence[str]
    ceilings: Ceilings
    equalities: Sequence[Equality]
    tests: DeviceTests | None
    timings: Sequence[Timing]

    @property
    def holds(self) -> bool:
        return all(equality.holds for equality in self.equalities) and (self.tests is None or self.tests.passed)

    def lines(self) -> list[str]:
        found = [
            f"device {self.device}, torch {self.torch}",
            f"copies {self.ceilings.bandwidth / 1e9:,.0f} GB/s",
            f"products {self.ceilings.matrix_rate / 1e12:,.2f} TFLOP/s",
            f"attention by {self.attention}",
            *(f"  not by {reason}" for reason in self.passed_over),
        ]
        for equality in self.equalities:
            words = "equal to transformers" if equality.holds else "NOT EQUAL to transformers"
            found.append(
                f"{words}: {equality.model}, {equality.attention}: {equality.positions} positions, largest error "
                f"{equality.largest_error:.4f} (at most {equality.tolerance:.4f}), {equality.others} other best tokens"
            )
        if self.tests is not None:
            found += [f"gpu tests: {'passed' if self.tests.passed else 'FAILED'}", self.tests.output]
        if self.timings:
            found.append(f"{'step':8} {'tokens':>6} {'graphs':>6} {'overlap':>7} {'ms':>9} {'floor':>9} {'reached':>7}")
            found += [_row(timing) for timing in self.timings]
        return found

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"holds": self.holds, **asdict(self)}, indent=1) + "\n")


def _row(timing: Timing) -> str:
    marks = [("yes" if mark else "no") for mark in (timing.graphs, timing.overlap)]
    return (
        f"{timing.what:8} {timing.tokens:6} {marks[0]:>6} {marks[1]:>7} {timing.seconds * 1e3:9.3f} "
        f"{timing.floor * 1e3:9.3f} {timing.of_floor:7.2f}"
    )
