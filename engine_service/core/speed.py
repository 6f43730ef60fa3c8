"""How fast the engine has been lately, and from that how soon a new request could have its first token.

Every estimate is on the early side: it refuses nobody that could have made it. Must not know: the clock (seconds are
arguments), requests, blocks.
"""

from math import exp

OPTIMISM = 0.5
"""An estimate is multiplied by it: those ahead may find prompts in the cache, end early or leave."""

SMOOTHING = 0.2
"""Part of the latest step in the mean time of steps of its size."""

DRAIN_WINDOW_S = 10.0
"""The rate at which the queue drains is that of about so many past seconds with a queue."""

LEAST_OBSERVED_S = 1.0
"""A rate that was observed for less is not used."""


class Speed:
    """Fed by the loop with each step. Sizes of steps are told apart by powers of two."""

    def __init__(self, step_token_budget: int) -> None:
        self._budget = step_token_budget
        self._step_s: list[float | None] = [None] * (step_token_budget.bit_length() + 1)
        self._started = 0.0
        self._observed_s = 0.0

    def observe_step(self, seconds: float, num_tokens: int) -> None:
        size = min(num_tokens.bit_length(), len(self._step_s) - 1)
        before = self._step_s[size]
        self._step_s[size] = seconds if before is None else before + SMOOTHING * (seconds - before)

    def observe_queue(self, seconds: float, num_started: int) -> None:
        """In so many seconds, in which requests were waiting all the time, so many were started."""
        kept = exp(-seconds / DRAIN_WINDOW_S)
        self._started = self._started * kept + num_started
        self._observed_s = self._observed_s * kept + seconds

    def starts_per_s(self) -> float | None:
        """None while too little was observed, and when nothing was started."""
        if self._observed_s < LEAST_OBSERVED_S or self._started < 1e-3:
            return None
        return self._started / self._observed_s

    def least_prompt_s(self, num_tokens: int) -> float:
        """Seconds that steps take, at the least, to compute so many prompt tokens; 0 when nothing is known."""
        full, rest = divmod(num_tokens, self._budget)
        return full * self._least_step_s(self._budget) + (self._least_step_s(rest) if rest else 0.0)

    def least_first_token_s(self, num_tokens: int, num_ahead: int, free_slots: int) -> float:
        """Until the first token of a request: `num_tokens` are to be computed up to its last prompt token, and
        `num_ahead` requests start before it, the first of them in `free_slots`."""
        rate = self.starts_per_s()
        to_end = num_ahead + 1 - free_slots
        slots_s = to_end / rate if rate is not None and num_ahead > 0 and to_end > 0 else 0.0
        return OPTIMISM * max(self.least_prompt_s(num_tokens), slots_s)

    def _least_step_s(self, num_tokens: int) -> float:
        """A step of that size takes at least as long as smaller ones do."""
        size = num_tokens.bit_length() if num_tokens == self._budget else (num_tokens + 1).bit_length() - 1
        return next((known for known in reversed(self._step_s[: size + 1]) if known is not None), 0.0)
