"""Stop strings against a slow reference on the whole text, for any text, stops and split."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer_service.text.stop_strings import StopStrings

letters = st.text(alphabet="ab\U0001f336", max_size=40)
stops_ = st.lists(st.text(alphabet="ab\U0001f336", min_size=1, max_size=9), max_size=5)
cuts = st.lists(st.integers(0, 40), max_size=8).map(sorted)


def expected(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The first end of a match; of those that end there, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


def held_back(text: str, stops: list[str]) -> int:
    """The least that must wait: the longest end of the text that begins a stop string."""
    sizes = [size for size in range(len(text) + 1) for stop in stops if text.endswith(stop[:size]) and size < len(stop)]
    return max(sizes, default=0)


@given(text=letters, stops=stops_, cuts_=cuts, include=st.booleans())
@settings(max_examples=800, deadline=None)
def test_any_split_equals_the_reference_and_holds_back_the_least(text, stops, cuts_, include):
    """B017 B019: the match, the text, and after each call what is shown and what waits."""
    found = StopStrings(stops, include=include)
    shown, matched, read = "", None, ""
    for start, end in zip([0, *cuts_], [*cuts_, len(text)], strict=True):
        emitted, matched = found.feed(text[start:end])
        shown, read = shown + emitted, read + text[start:end]
        if matched is not None:
            break
        assert len(read) - len(shown) == (0 if include else held_back(read, stops))
        assert read.startswith(shown)
    assert (shown + found.flush(), matched) == expected(text, stops, include)
