"""What happened when, in slots of a tenth of a second.

Must not know: latencies, what a good answer is.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from enum import Enum

SLOT_S = 0.1
_SLOTS_PER_SECOND = round(1 / SLOT_S)


class Event(Enum):
    """What is counted."""

    STARTED = "started"
    FINISHED = "finished"  # ended well or left on purpose
    OK = "ok"
    GOOD = "good"
    FAILED = "failed"
    TOKENS = "tokens"
    PROMPT_TOKENS = "prompt_tokens"  # of requests that ended well, at their end


@dataclass(frozen=True, slots=True)
class Series:
    """Per second of the run, for the plots; `in_flight` is at the end of each second."""

    started: tuple[int, ...] = ()
    finished: tuple[int, ...] = ()
    failed: tuple[int, ...] = ()
    tokens: tuple[float, ...] = ()
    in_flight: tuple[int, ...] = ()


class Timeline:
    """`begin` is the run's; times are of its clock."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._counts: dict[Event, defaultdict[int, float]] = {event: defaultdict(float) for event in Event}

    def add(self, event: Event, at: float, amount: float = 1) -> None:
        self._counts[event][max(0, math.floor((at - self._begin) / SLOT_S))] += amount

    def between(self, event: Event, begin: int, end: int) -> float:
        """Of the slots from `begin` to before `end`."""
        return sum(amount for slot, amount in self._counts[event].items() if begin <= slot < end)

    def series(self) -> Series:
        shown = (Event.STARTED, Event.FINISHED, Event.FAILED, Event.TOKENS)
        seconds = 1 + max((slot // _SLOTS_PER_SECOND for event in shown for slot in self._counts[event]), default=-1)
        columns = [[0.0] * seconds for _ in shown]
        for column, event in zip(columns, shown, strict=True):
            for slot, amount in self._counts[event].items():
                column[slot // _SLOTS_PER_SECOND] += amount
        started, finished, failed = (tuple(map(int, column)) for column in columns[:3])
        running, in_flight = 0, []
        for begun, done, bad in zip(started, finished, failed, strict=True):
            running += begun - done - bad
            in_flight.append(running)
        return Series(started, finished, failed, tuple(round(value, 1) for value in columns[3]), tuple(in_flight))


def slots_in(seconds: float) -> int:
    """Whole slots in that time from the run's begin."""
    return math.floor(seconds / SLOT_S + 1e-6)
