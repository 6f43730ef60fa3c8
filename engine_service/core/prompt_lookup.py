"""Guesses how a request goes on: where its last tokens stood before, and what followed them there.

Chains of positions by the hash of two tokens, as DEFLATE keeps them: a head for each hash, a link to the position
before for each token. Must not know: what a guess costs, steps, blocks, sampling.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice

from engine_service.core.hit_rates import MOST_MATCHED, HitRates

MOST_CANDIDATES = 8
"""Earlier places that are compared: the latest ones."""

_MOST_HEADS = 1 << 15
_NOWHERE = -1


class PromptLookup:
    """The index of one request's tokens, which are only ever appended to; it follows them by `catch_up`.

    Memory: 4 bytes for a token, and for each of at most _MOST_HEADS hashes. A match is at least two tokens long; of
    the candidates the one with the longest match is followed, of equal ones the latest, until it is wrong.
    """

    __slots__ = ("_follow", "_heads", "_links", "_mask", "_num_given", "_rates", "_tokens", "match")

    def __init__(self, token_ids: Sequence[int], num_given: int, most_tokens: int, rates: HitRates) -> None:
        """`token_ids` is the request's own list. The first `num_given` tokens were not generated here: to guess them
        right would say nothing. `most_tokens`: how long the list may become. `rates` are told of each guess."""
        heads = 1 << min(most_tokens.bit_length(), _MOST_HEADS.bit_length() - 1)
        self._tokens = token_ids
        self._num_given = num_given
        self._rates = rates
        self._mask = heads - 1
        self._heads = array("i", [_NOWHERE]) * heads
        self._links = array("i")
        self._follow = 0  # the place of the token that is expected next; 0: none is
        self.match = 0
        """How many of the last tokens are those before the expected one: MOST_MATCHED stands for more."""

    def catch_up(self, most: int) -> int:
        """Takes up to `most` tokens that it has not seen; how many it took. Afterwards see `is_ready`."""
        begin = len(self._links)
        end = min(len(self._tokens), begin + most)
        for place in range(begin, min(end, self._num_given)):
            self._add(place)
        for place in range(max(begin, self._num_given), end):
            self._check(place)
            before = self._add(place)
            if self._follow == 0:
                self._search(place, before)
        return end - begin

    @property
    def is_ready(self) -> bool:
        """Whether it has seen all tokens and expects something."""
        return self._follow > 0 and len(self._links) == len(self._tokens)

    def chances(self, most: int) -> Iterator[float]:
        """Probabilities that the first of the next tokens is guessed right, the first two are, ...; `most` of them."""
        return islice(self._rates.survival(self.match), max(0, most))

    def guess(self, count: int) -> tuple[int, ...]:
        """The next `count` tokens, if `is_ready`. What follows may run into the guess itself: text that repeats."""
        piece = self._tokens[self._follow : self._follow + count]
        return tuple(piece[i % len(piece)] for i in range(count))

    def _check(self, place: int) -> None:
        """Whether the token that came at `place` is the expected one."""
        if self._follow == 0:
            return
        is_hit = self._tokens[self._follow] == self._tokens[place]
        self._rates.tell(self.match, is_hit)
        if is_hit:
            self._follow += 1
            self.match = min(self.match + 1, MOST_MATCHED)
        else:
            self._follow = 0

    def _add(self, place: int) -> int:
        """Indexes the two tokens that end at `place`; the latest place before with their hash."""
        tokens = self._tokens
        slot = hash((tokens[place - 1], tokens[place])) & self._mask if place else 0
        before = self._heads[slot] if place else _NOWHERE
        self._links.append(before)
        if place:
            self._heads[slot] = place
        return before

    def _search(self, end: int, candidate: int) -> None:
        best, follow = 1, 0
        for _ in range(MOST_CANDIDATES):
            if candidate == _NOWHERE:
                break
            matched = self._matched(candidate, end)
            if matched > best:
                best, follow = matched, candidate + 1
            if matched == MOST_MATCHED:
                break
            candidate = self._links[candidate]
        self._follow, self.match = follow, best

    def _matched(self, place: int, end: int) -> int:
        """How many tokens up to `place` and up to `end` are the same."""
        tokens, count = self._tokens, 0
        most = min(MOST_MATCHED, place + 1)
        while count < most and tokens[place - count] == tokens[end - count]:
            count += 1
        return count
