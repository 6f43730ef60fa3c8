"""Prompt lookup against a slow plain search, and the chances it is given."""

from itertools import islice, pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.core.hit_rates import LEAST_MATCHED, MOST_MATCHED, CommonRates, HitRates
from engine_service.core.prompt_lookup import MOST_CANDIDATES, PromptLookup

VOCABULARY = range(4)
MOST_TOKENS = 1 << 15


class Told(HitRates):
    """Rates that only note what they are told."""

    def __init__(self) -> None:
        super().__init__(CommonRates())
        self.trials: list[tuple[int, bool]] = []

    def tell(self, match: int, is_hit: bool) -> None:
        self.trials.append((match, is_hit))


def matched(tokens: list[int], place: int, end: int) -> int:
    """The longest equal tails of what ends at `place` and at `end`."""
    return max(
        n
        for n in range(MOST_MATCHED + 1)
        if n <= place + 1 and tokens[place + 1 - n : place + 1] == tokens[end + 1 - n : end + 1]
    )


def plain(tokens: list[int], num_given: int) -> tuple[int, int, list[tuple[int, bool]]]:
    """The place of the expected token (0: none), the match, and all guesses so far."""
    follow, match = 0, 0
    trials: list[tuple[int, bool]] = []
    for end in range(num_given, len(tokens)):
        if follow:
            trials.append((match, tokens[follow] == tokens[end]))
            follow, match = (follow + 1, min(match + 1, MOST_MATCHED)) if trials[-1][1] else (0, match)
        if not follow:
            before = [p for p in range(end - 1, 0, -1) if tokens[p - 1 : p + 1] == tokens[end - 1 : end + 1]]
            lengths = [matched(tokens, place, end) for place in before[:MOST_CANDIDATES]]
            match = max(lengths, default=0)
            follow = before[lengths.index(match)] + 1 if lengths else 0
    return follow, match, trials


def test_pairs_of_the_test_vocabulary_have_different_hashes() -> None:
    """So the plain search, which knows no hashes, compares the same candidates."""
    slots = {hash(pair) & (MOST_TOKENS - 1) for pair in product(VOCABULARY, repeat=2)}
    assert len(slots) == len(VOCABULARY) ** 2


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.lists(st.sampled_from(VOCABULARY), min_size=1, max_size=80),
    num_given=st.integers(0, 80),
    portions=st.lists(st.integers(1, 30), min_size=1, max_size=5),
    count=st.integers(1, 20),
)
def test_it_expects_what_a_plain_search_expects(
    tokens: list[int], num_given: int, portions: list[int], count: int
) -> None:
    """However the text comes and in whatever portions it is taken."""
    num_given = min(num_given, len(tokens))
    told = Told()
    known = tokens[:num_given]
    lookup = PromptLookup(known, num_given, MOST_TOKENS, told)
    turn = 0
    while lookup.catch_up(portions[turn % len(portions)]) or len(known) < len(tokens):
        turn += 1
        known.extend(tokens[len(known) :][: 1 + turn % 3])
    follow, match, trials = plain(tokens, num_given)
    assert told.trials == trials
    assert lookup.is_ready == (follow > 0)
    if follow:
        assert lookup.match == match
        extended = list(tokens)
        for place in range(count):
            extended.append(extended[follow + place])
        assert lookup.guess(count) == tuple(extended[len(tokens) :])


@settings(max_examples=50, deadline=None)
@given(tokens=st.lists(st.integers(0, 200_000), max_size=300) | st.lists(st.integers(0, 30), max_size=300))
def test_few_heads_only_hide_matches(tokens: list[int]) -> None:
    """Different pairs that share a slot are never taken for each other."""
    lookup = PromptLookup(tokens, len(tokens) // 2, 8, Told())
    lookup.catch_up(len(tokens))
    if lookup.is_ready:
        place = lookup._follow
        assert LEAST_MATCHED <= lookup.match <= MOST_MATCHED
        # At least the last two tokens, and all that it says are the same.
        assert tokens[place - lookup.match : place] == tokens[len(tokens) - lookup.match :]


def test_it_is_not_ready_before_it_has_caught_up() -> None:
    tokens = [1, 2, 3] * 20
    lookup = PromptLookup(tokens, 50, 100, HitRates(CommonRates()))
    assert lookup.catch_up(55) == 55
    assert not lookup.is_ready
    assert lookup.catch_up(55) == 5
    assert lookup.is_ready
    assert lookup.guess(7) == (1, 2, 3, 1, 2, 3, 1)


def test_chances_follow_what_is_told() -> None:
    common = CommonRates()
    good, bad = HitRates(common), HitRates(common)
    for _ in range(200):
        for match in range(LEAST_MATCHED, MOST_MATCHED + 1):
            good.tell(match, True)
            bad.tell(match, False)
    assert min(islice(good.survival(2), 4)) > 0.5
    assert max(islice(bad.survival(2), 4)) < 0.2
    for rates in (good, bad, HitRates(common)):
        chances = list(islice(rates.survival(3), 30))
        assert all(0 < later < earlier < 1 for earlier, later in pairwise(chances))


def test_a_new_request_begins_with_what_is_common() -> None:
    common = CommonRates()
    teacher = HitRates(common)
    before = HitRates(common).rate(4)
    for _ in range(1000):
        teacher.tell(4, True)
    assert before < HitRates(common).rate(4) == pytest.approx(common.rate(2))
