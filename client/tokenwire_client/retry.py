"""When a failed call is tried again, and how long all of its attempts may take.

Must not know: grpc, what the call does. Sleeping is the caller's.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from tokenwire_client.errors import TokenwireError, Unavailable, invalid

# Beyond this gRPC's deadlines overflow; about three years.
MAX_TIMEOUT_S = 1e8


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Only UNAVAILABLE is tried again, and only while nothing of the answer has arrived.

    `attempts` counts the first one; the pause after the n-th failure is between half and all of
    `first_backoff * 2^(n-1)` seconds, at most `max_backoff`. A server that asks for a longer pause is not
    tried again. `jitter` gives numbers in [0, 1).
    """

    attempts: int = 4
    first_backoff: float = 0.1
    max_backoff: float = 2.0
    jitter: Callable[[], float] = random.random

    def backoff(self, failures: int) -> float:
        """Seconds to wait after that many failures, >= 1."""
        ceiling = min(self.max_backoff, self.first_backoff * 2.0 ** min(failures - 1, 64))
        return ceiling * (0.5 + 0.5 * self.jitter())


DEFAULT_RETRIES = RetryPolicy()
NO_RETRIES = RetryPolicy(attempts=1)


def check_timeout(timeout: float | None) -> float | None:
    """Seconds, or None for no limit (also for infinity); raises InvalidRequest for anything else."""
    if timeout is None or timeout == math.inf:
        return None
    if not 0 < timeout <= MAX_TIMEOUT_S:
        raise invalid("timeout", f"must be in (0, {MAX_TIMEOUT_S:.0f}] seconds, or infinite; got {timeout}")
    return timeout


class Attempts:
    """The budget of one call: its attempts and its time, over all of them together."""

    def __init__(self, policy: RetryPolicy, timeout: float | None, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._deadline = None if timeout is None else clock() + timeout
        self._failures = 0

    def remaining(self) -> float | None:
        """Seconds left, >= 0; None without a limit."""
        return None if self._deadline is None else max(0.0, self._deadline - self._clock())

    def pause_after(self, error: TokenwireError, elsewhere: bool = False) -> float | None:
        """Seconds to wait before the next attempt; None: there is none, raise the error.

        `elsewhere`: it goes to another service than the one that asked for a pause.
        """
        self._failures += 1
        if not isinstance(error, Unavailable) or self._failures >= self._policy.attempts:
            return None
        asked = 0.0 if elsewhere else error.retry_after or 0.0
        pause = max(self._policy.backoff(self._failures), asked)
        remaining = self.remaining()
        if pause > self._policy.max_backoff or (remaining is not None and pause >= remaining):
            return None
        return pause
