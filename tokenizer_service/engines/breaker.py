"""A circuit breaker: a replica that fails again and again gets no requests for a while, then one to try.

Must not know: engines, requests, what counts as a failure.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum


class BreakerState(Enum):
    """The value is what the metric shows."""

    CLOSED = 0  # everything goes through
    HALF_OPEN = 1  # one request may try
    OPEN = 2  # nothing goes through


@dataclass(frozen=True, slots=True)
class BreakerLimits:
    """`failures` in a row open it for `first_open_s` seconds; each trial that fails too, for twice as long again."""

    failures: int = 3
    first_open_s: float = 1.0
    max_open_s: float = 30.0


@dataclass(slots=True)
class Breaker:
    """Of one replica. `clock` gives seconds.

    Half open, it lets one request through; if nothing is heard of that one for as long as it was open, another.
    """

    limits: BreakerLimits
    clock: Callable[[], float]
    _failures: int = 0  # in a row
    _openings: int = 0  # in a row
    _shut_until: float | None = None  # None: it is closed, requests pass
    _is_tried: bool = False

    @property
    def state(self) -> BreakerState:
        if self._shut_until is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self.clock() < self._shut_until else BreakerState.HALF_OPEN

    @property
    def allows(self) -> bool:
        """Whether a request may be sent now."""
        return self._shut_until is None or self.clock() >= self._shut_until

    @property
    def is_troubled(self) -> bool:
        """Whether a success would change anything; cheap, since it is asked at every step."""
        return self._failures > 0 or self._shut_until is not None

    def on_sent(self) -> None:
        """A request was sent."""
        if self._shut_until is not None and self.allows:
            self._is_tried = True
            self._shut_until = self.clock() + self._open_s()

    def on_success(self) -> None:
        """The replica did what it should."""
        self._failures = self._openings = 0
        self._shut_until = None
        self._is_tried = False

    def on_failure(self) -> None:
        """The replica failed: not a refusal that is the client's mistake, nor a full queue."""
        self._failures += 1
        is_open = self._shut_until is not None and not self._is_tried and not self.allows
        if not is_open and (self._shut_until is not None or self._failures >= self.limits.failures):
            self.trip()

    def trip(self, at_least_s: float = 0.0) -> None:
        """Opens it now, whatever was before."""
        self._failures += 1
        self._openings += 1
        self._is_tried = False
        self._shut_until = self.clock() + max(at_least_s, self._open_s())

    def _open_s(self) -> float:
        doublings = min(max(self._openings - 1, 0), 32)
        return min(self.limits.max_open_s, self.limits.first_open_s * float(2**doublings))
