"""Finds stop strings in streamed text, holding back only what may become one.

Must not know: tokens, the engine, why a request has these stop strings.
"""

from collections.abc import Sequence

from tokenizer_service.text.errors import TextError


def check_stops(stops: Sequence[str], *, max_stops: int, max_chars: int) -> None:
    """Raises TextError("stop", ...) for too many, an empty or a too long stop string."""
    if len(stops) > max_stops:
        raise TextError("stop", f"{len(stops):,} stop strings exceed the limit of {max_stops:,}")
    for place, stop in enumerate(stops):
        if not stop:
            raise TextError("stop", f"stop[{place}] is empty; a stop string has 1 to {max_chars:,} characters")
        if len(stop) > max_chars:
            message = f"stop[{place}] has {len(stop):,} characters, more than the limit of {max_chars:,}"
            raise TextError("stop", message)


class StopStrings:
    """The stop strings of one request.

    The match that ends first wins: it is known at its last character, whatever comes later, so the result
    does not depend on how the text is cut into calls. Of matches that end together the longest wins. (Where
    the match that begins first does not also end first, that is "bc" against "abcd", waiting for it would
    hold text back for a match that may never come.)

    Cost per character: amortised constant for each stop string (Knuth-Morris-Pratt), and one set look-up for
    all of them while none has begun. Memory: less than one longest stop string of text, and the part of the
    failure tables that was needed so far.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """`stops` are not empty (see check_stops). `include`: a matched stop string stays in the text."""
        self._matchers = [_Matcher(stop) for stop in stops]
        self._first_characters = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""
        self._begun = False
        self._matched: str | None = None

    def feed(self, text: str) -> tuple[str, str | None]:
        """(text to show now, the stop string that was found); after a match nothing more is shown."""
        if self._matched is not None:
            return "", self._matched
        if not self._begun and self._first_characters.isdisjoint(text):
            return text, None
        end, stop = self._read(text)
        window = self._held + text
        if stop is not None:
            shown = len(self._held) + end - (0 if self._include else len(stop))
            self._matched, self._held = stop, ""
            return window[:shown], stop
        longest = max(matcher.state for matcher in self._matchers)
        self._begun = longest > 0
        if self._include:
            return text, None  # a match would be shown anyhow: nothing needs to wait
        shown = len(window) - longest
        self._held = window[shown:]
        return window[:shown], None

    def flush(self) -> str:
        """The text still held back, when the generation ended without a match."""
        held, self._held = self._held, ""
        return held

    def _read(self, text: str) -> tuple[int, str | None]:
        """Moves every matcher over `text`; the place where the winning match ends, and the stop string."""
        end, winner = len(text), None
        for matcher in self._matchers:
            found = matcher.read(text, end)
            if found is None:
                continue
            if winner is None or found < end or len(matcher.stop) > len(winner):
                winner = matcher.stop
            end = found
        return end, winner


class _Matcher:
    """One stop string; `state` is the length of the longest end of the text so far that begins it."""

    __slots__ = ("_failure", "state", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.state = 0
        self._failure = [0]  # of the prefixes of length 1, 2, ...; extended when a state is first reached

    def read(self, text: str, limit: int) -> int | None:
        """Reads text[:limit]; the place behind the first full match, or None."""
        stop, failure, state = self.stop, self._failure, self.state
        place = 0
        while place < limit:
            if state == 0:
                place = text.find(stop[0], place, limit)
                if place < 0:
                    break
            while state and stop[state] != text[place]:
                state = failure[state - 1]
            if stop[state] == text[place]:
                state += 1
            place += 1
            if state == len(stop):
                return place
            if state > len(failure):
                self._extend()
        self.state = state
        return None

    def _extend(self) -> None:
        failure, character = self._failure, self.stop[len(self._failure)]
        length = failure[-1]
        while length and self.stop[length] != character:
            length = failure[length - 1]
        failure.append(length + 1 if self.stop[length] == character else 0)
