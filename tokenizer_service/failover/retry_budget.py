"""How many requests may be sent to an engine once more: a share of all, so that a sick fleet is not flooded.

Must not know: engines, requests, why one is sent again.
"""

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class BudgetLimits:
    """Every new request earns `share` of a retry, every second `per_second`; at most `burst` are kept."""

    share: float = 0.5
    burst: float = 1024.0
    per_second: float = 1.0


@dataclass(slots=True)
class RetryBudget:
    """A token bucket that begins full: all requests of a large engine that dies may go elsewhere at once.

    `clock` gives seconds.
    """

    limits: BudgetLimits
    clock: Callable[[], float]
    _left: float = field(init=False)
    _filled_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._left = self.limits.burst
        self._filled_at = self.clock()

    @property
    def left(self) -> float:
        """Retries that may be made now."""
        now = self.clock()
        gained = max(0.0, now - self._filled_at) * self.limits.per_second
        self._left = min(self.limits.burst, self._left + gained)
        self._filled_at = now
        return self._left

    def earn(self) -> None:
        """A new request has come."""
        self._left = min(self.limits.burst, self._left + self.limits.share)

    def spend(self) -> bool:
        """Takes a retry out; False when there is none."""
        if self.left < 1.0:
            return False
        self._left -= 1.0
        return True
