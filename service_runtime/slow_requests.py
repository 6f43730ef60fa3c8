"""Log lines about requests that took too long, a bounded number of them: overload must not flood the log.

Must not know: what a request is, where its time went.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

BURST = 20
PER_SECOND = 1.0
"""So many lines at once, and so many a second after that."""

_log = structlog.get_logger()


@dataclass(slots=True)
class SlowRequests:
    """`threshold_s` 0: off. `clock` gives seconds."""

    threshold_s: float
    clock: Callable[[], float]
    _left: float = field(default=BURST, init=False)
    _filled_at: float = field(init=False)
    _left_out: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._filled_at = self.clock()

    def is_slow(self, seconds: float) -> bool:
        return 0 < self.threshold_s <= seconds

    def tell(self, fields: Callable[[], Mapping[str, Any]]) -> None:
        """One line `slow_request` with these fields, or none: then the next line says how many were left out."""
        now = self.clock()
        self._left = min(BURST, self._left + (now - self._filled_at) * PER_SECOND)
        self._filled_at = now
        if self._left < 1:
            self._left_out += 1
            return
        self._left -= 1
        left_out, self._left_out = self._left_out, 0
        more = {"left_out": left_out} if left_out else {}
        _log.warning("slow_request", **fields(), **more)


def never_slow() -> SlowRequests:
    return SlowRequests(0.0, lambda: 0.0)
