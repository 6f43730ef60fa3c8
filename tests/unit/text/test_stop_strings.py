"""Stop strings by example (area 2 of the faults)."""

import pytest

from tokenizer_service.text.errors import TextError
from tokenizer_service.text.stop_strings import StopStrings, check_stops

CASES = [
    # stops, deltas, include, shown after each delta, matched, flushed
    (["DE"], [" DEF", "GH"], False, [" ", ""], "DE", ""),  # B017: inside a token
    (["DE"], [" DEF"], True, [" DE"], "DE", ""),
    ([".."], ["..."], False, [""], "..", ""),  # B017: no dot is left
    (["pepper"], ["pep", "per!"], False, ["", ""], "pepper", ""),  # across tokens
    (["pepper"], ["pep", "per!"], True, ["pep", "per"], "pepper", ""),
    (["ab"], ["a", "c"], False, ["", "ac"], None, ""),  # held, then let go
    (["ab"], ["xa"], False, ["x"], None, "a"),  # B019: only what may become one; the rest at the end
    (["Z" * 20], ["one ", "two ", "three"], False, ["one ", "two ", "three"], None, ""),  # B019: lag 0
    (["abcd", "bc"], ["abc"], False, ["a"], "bc", ""),  # the first to end wins
    (["b", "ab"], ["xab"], False, ["x"], "ab", ""),  # of those that end together, the longest
    (["ab", "b"], ["xab"], False, ["x"], "ab", ""),
    (["aab"], ["aaaab"], False, ["aa"], "aab", ""),  # falls back inside itself
    (["aabaaac"], ["aabaaab", "aaac"], False, ["aaba", ""], "aabaaac", ""),
    (["abab!"], ["abab", "ab!"], False, ["", "ab"], "abab!", ""),
    (["\U0001f336"], [" \U0001f336 pepper"], False, [" "], "\U0001f336", ""),
    (["x"], ["", "x"], False, ["", ""], "x", ""),
    ([], ["a", "b"], False, ["a", "b"], None, ""),
]


@pytest.mark.parametrize(("stops", "deltas", "include", "shown", "matched", "flushed"), CASES)
def test_by_table(stops, deltas, include, shown, matched, flushed):
    """B017 B019."""
    found = StopStrings(stops, include=include)
    results = [found.feed(delta) for delta in deltas]
    assert [text for text, _ in results] == shown
    assert results[-1][1] == matched
    assert found.flush() == flushed


def test_nothing_is_shown_after_a_match():
    found = StopStrings(["."], include=False)
    assert found.feed("a.b") == ("a", ".")
    assert found.feed("c") == ("", ".")
    assert found.flush() == ""


class CountedText(str):
    """Text that counts how often one of its characters is read."""

    __slots__ = ("reads",)

    def __new__(cls, text: str) -> "CountedText":
        self = super().__new__(cls, text)
        self.reads = 0
        return self

    def __getitem__(self, place):
        self.reads += 1
        return super().__getitem__(place)


def test_hostile_stops_cost_a_constant_for_each_character():
    """64 stops of 1,024 characters that all but match, as a count of comparisons: linear in stops x text."""
    stops = ["a" * (1023 - rank) + "b" for rank in range(64)]
    found = StopStrings(stops, include=False)
    shown, reads = 0, 0
    for _ in range(100):
        delta = CountedText("a" * 40)
        text, matched = found.feed(delta)
        assert matched is None
        shown, reads = shown + len(text), reads + delta.reads
    assert 4000 - shown == 1023  # the least that must wait
    assert 64 * 4000 <= reads <= 64 * 4000 * 4


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([""], "stop[0] is empty"),
        (["x", ""], "stop[1] is empty"),
        (["x"] * 65, "65 stop strings exceed the limit of 64"),
        (["x", "y" * 1025], "stop[1] has 1,025 characters, more than the limit of 1,024"),
    ],
)
def test_bad_stops_are_refused_with_numbers(stops, message):
    """B021."""
    with pytest.raises(TextError) as raised:
        check_stops(stops, max_stops=64, max_chars=1024)
    assert raised.value.field == "stop"
    assert message in raised.value.message


def test_stops_within_the_limits_pass():
    """B021."""
    check_stops([], max_stops=64, max_chars=1024)
    check_stops(["x" * 1024] * 64, max_stops=64, max_chars=1024)
