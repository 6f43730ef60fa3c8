"""How long prompts and answers are: distributions of token counts, as the command line writes them.

Must not know: prompts, time, targets.
"""

import math
import random
from dataclasses import dataclass
from typing import Protocol

MAX_TOKENS = 1_000_000


class Lengths(Protocol):
    """A distribution of whole numbers in [1, MAX_TOKENS]."""

    def draw(self, source: random.Random) -> int: ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same number."""

    tokens: int

    def __post_init__(self) -> None:
        _check("length", self.tokens)

    def draw(self, source: random.Random) -> int:
        return self.tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Each number from `low` to `high`, both included, equally likely."""

    low: int
    high: int

    def __post_init__(self) -> None:
        _check("lower end", self.low)
        _check("upper end", self.high)
        if self.low > self.high:
            raise ValueError(f"the range {self.low} to {self.high} is empty")

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp of a normal distribution around log(median) with deviation `sigma`, rounded, cut to `most`."""

    median: int
    sigma: float
    most: int = MAX_TOKENS

    def __post_init__(self) -> None:
        _check("median", self.median)
        _check("upper end", self.most)
        if not 0 <= self.sigma <= 5:
            raise ValueError(f"sigma {self.sigma:g} is outside [0, 5]")

    def draw(self, source: random.Random) -> int:
        return min(self.most, max(1, round(source.lognormvariate(math.log(self.median), self.sigma))))


def parse_lengths(text: str) -> Lengths:
    """`100`, `uniform:50,150`, `lognormal:MEDIAN,SIGMA` or `lognormal:MEDIAN,SIGMA,MOST`. Raises ValueError."""
    kind, _, rest = text.partition(":")
    parts = [part.strip() for part in rest.split(",")] if rest else []
    try:
        if not parts:
            return Fixed(int(kind))
        if kind == "fixed" and len(parts) == 1:
            return Fixed(int(parts[0]))
        if kind == "uniform" and len(parts) == 2:
            return Uniform(int(parts[0]), int(parts[1]))
        if kind == "lognormal" and len(parts) in (2, 3):
            return LogNormal(int(parts[0]), float(parts[1]), *map(int, parts[2:]))
    except ValueError as error:
        if "invalid literal" not in str(error) and "could not convert" not in str(error):
            raise
    raise ValueError(f"{text!r} is none of N, uniform:LOW,HIGH, lognormal:MEDIAN,SIGMA and lognormal:MEDIAN,SIGMA,MOST")


def _check(name: str, tokens: int) -> None:
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{name} of {tokens} tokens is outside [1, {MAX_TOKENS}]")
