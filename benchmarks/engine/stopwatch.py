"""Times calls of living objects: a stopwatch is put in front of their methods.

Must not know: what the objects do.
"""

from collections.abc import Callable
from typing import Any


class Stopwatch:
    """Seconds by name since the last `take`. A call inside a timed call counts for both."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    def watch(self, owner: Any, method: str, name: str) -> None:
        """From now on calls of `owner.method` count as `name`. AttributeError when there is no such method."""
        inner = getattr(owner, method)

        def timed(*arguments: Any, **named: Any) -> Any:
            started = self._clock()
            try:
                return inner(*arguments, **named)
            finally:
                self.add(name, self._clock() - started)

        setattr(owner, method, timed)

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """What was counted, and begins again."""
        seconds, self._seconds = self._seconds, {}
        return seconds
