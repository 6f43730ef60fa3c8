"""Growing pauses with jitter, so that many who wait for the same thing do not come back at the same moment.

Must not know: what is waited for.
"""

from dataclasses import dataclass

_MOST_DOUBLINGS = 32


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds: the first pause is at most `first_s`, each next one at most twice the one before, none over `max_s`."""

    first_s: float
    max_s: float

    def pause(self, turn: int, jitter: float) -> float:
        """Of pause number `turn` (from 0): between half of its most and its most. `jitter` is in [0, 1)."""
        most = min(self.max_s, self.first_s * float(2 ** min(turn, _MOST_DOUBLINGS)))
        return most * (0.5 + jitter / 2)
