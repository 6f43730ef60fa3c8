"""How often guesses by prompt lookup were right, by the length of the match that they followed.

Must not know: tokens, how a guess is made, what it is used for.
"""

from collections.abc import Iterator

LEAST_MATCHED = 2
MOST_MATCHED = 8
"""Longer matches count as this long."""

KEPT = 0.95
"""Of what was known of a request before its latest guess: about the last 20 count."""

KEPT_IN_COMMON = 0.998
WEIGHT_OF_COMMON = 4.0
"""A request begins as if so many guesses had gone as they commonly do."""

_COMMON_AT_FIRST = (0.25, 0.35, 0.45, 0.5, 0.55, 0.6, 0.7)
_WEIGHT_AT_FIRST = 50.0


class CommonRates:
    """Those of all requests of an engine, which new ones begin with."""

    def __init__(self) -> None:
        self._tried = [_WEIGHT_AT_FIRST] * len(_COMMON_AT_FIRST)
        self._right = [_WEIGHT_AT_FIRST * rate for rate in _COMMON_AT_FIRST]

    def tell(self, place: int, is_hit: bool) -> None:
        self._tried[place] = self._tried[place] * KEPT_IN_COMMON + 1.0
        self._right[place] = self._right[place] * KEPT_IN_COMMON + is_hit

    def rate(self, place: int) -> float:
        return self._right[place] / self._tried[place]


class HitRates:
    """Those of one request."""

    __slots__ = ("_common", "_right", "_tried")

    def __init__(self, common: CommonRates) -> None:
        self._common = common
        self._tried = [0.0] * len(_COMMON_AT_FIRST)
        self._right = [0.0] * len(_COMMON_AT_FIRST)

    def tell(self, match: int, is_hit: bool) -> None:
        """A token came for which another was expected after a match so long, or the expected one."""
        place = match - LEAST_MATCHED
        self._tried[place] = self._tried[place] * KEPT + 1.0
        self._right[place] = self._right[place] * KEPT + is_hit
        self._common.tell(place, is_hit)

    def rate(self, match: int) -> float:
        """Probability that the token expected after a match so long is right."""
        place = match - LEAST_MATCHED
        prior = WEIGHT_OF_COMMON * self._common.rate(place)
        return (self._right[place] + prior) / (self._tried[place] + WEIGHT_OF_COMMON)

    def survival(self, match: int) -> Iterator[float]:
        """Probabilities that the first guess is right, the first two are, ...: with each the match gets longer."""
        chance = 1.0
        for length in range(match, MOST_MATCHED):
            chance *= self.rate(length)
            yield chance
        last = self.rate(MOST_MATCHED)
        while True:
            chance *= last
            yield chance
