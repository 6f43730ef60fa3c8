"""When requests are meant to start: schedules of an open loop, as seconds from its beginning.

Must not know: requests, clocks. A schedule is a function of its arguments: the same seed gives the same times.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

MAX_RATE = 100_000.0


class ArrivalKind(Enum):
    """How the load comes."""

    CLOSED = "closed"  # so many clients, each sends its next request when the last one is answered
    CONSTANT = "constant"  # equal gaps
    POISSON = "poisson"  # independent users
    BURSTY = "bursty"  # gamma distributed gaps, more variable than Poisson's
    TRACE = "trace"  # as recorded


@dataclass(frozen=True, slots=True)
class Pace:
    """Requests per second. `burstiness` is the coefficient of variation of the gaps (deviation / mean) of bursty
    arrivals; 1 is Poisson, 0 would be constant."""

    kind: ArrivalKind
    rate: float
    burstiness: float = 3.0

    def __post_init__(self) -> None:
        if self.kind not in (ArrivalKind.CONSTANT, ArrivalKind.POISSON, ArrivalKind.BURSTY):
            raise ValueError(f"{self.kind.value} arrivals have no rate")
        if not 0 < self.rate <= MAX_RATE:
            raise ValueError(f"rate {self.rate:g} is outside (0, {MAX_RATE:g}] requests per second")
        if not 0 < self.burstiness <= 100:
            raise ValueError(f"burstiness {self.burstiness:g} is outside (0, 100]")


def schedule(pace: Pace, seed: int) -> Iterator[float]:
    """Endless, never decreasing. The first arrival of a constant pace is at 0, of the others after a drawn gap."""
    if pace.kind is ArrivalKind.CONSTANT:
        for number in itertools.count():
            yield number / pace.rate
    source = random.Random(f"arrivals-{seed}")  # noqa: S311 (no secret)
    now = 0.0
    while True:
        now += _gap(pace, source)
        yield now


def _gap(pace: Pace, source: random.Random) -> float:
    """Of mean 1 / rate. Gamma with shape k has the coefficient of variation 1 / sqrt(k)."""
    if pace.kind is ArrivalKind.POISSON:
        return source.expovariate(pace.rate)
    shape = pace.burstiness**-2
    return source.gammavariate(shape, 1 / (shape * pace.rate))


def scaled(times: Sequence[float], time_scale: float) -> Iterator[float]:
    """Recorded times `time_scale` times as fast. Raises ValueError at once."""
    if not 0 < time_scale <= 1e6:
        raise ValueError(f"time scale {time_scale:g} is outside (0, 1000000]")
    return (at / time_scale for at in times)
