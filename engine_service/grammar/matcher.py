"""Follows one completion through its grammar: which tokens may come next, and the move when one has come.

Must not know: logits, batches, requests' other rules.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from copy import copy
from typing import TYPE_CHECKING

from engine_service.grammar.limits import GrammarLimits

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

CpuClock = Callable[[], float]
_MAX_MESSAGE = 300
_EXCERPT = re.compile(r"^\s*\d+ \| ", re.MULTILINE)  # of the library's own source text, which the client never wrote


class GrammarFailure(Exception):
    """This completion cannot go on under its grammar; the message is for the client."""


class Grammar:
    """A compiled grammar; each completion gets a matcher of its own."""

    def __init__(self, vocabulary: "LLTokenizer", text: str, limits: GrammarLimits) -> None:
        """`text` is the library's own format. Releases the interpreter while it compiles. Raises GrammarFailure."""
        from llguidance import LLMatcher  # a worker without grammars runs where it is not installed

        self._first = LLMatcher(vocabulary, text, log_level=0, limits=limits.parser())
        if self._first.is_error():
            raise GrammarFailure(plain_message(self._first.get_error()))
        self._size = vocabulary.vocab_size
        self._limits = limits
        self.num_taken = 0
        """Tokens of the completion that matchers of this grammar have taken already."""

    def advanced(self, token_ids: Sequence[int]) -> "Grammar":
        """The same grammar, for a completion that begins with these tokens. Raises GrammarFailure."""
        other = copy(self)
        other._first = self._first.deep_copy()
        taken = other._first.try_consume_tokens(list(token_ids))
        if taken != len(token_ids):
            message = f"token {taken:,} of the {len(token_ids):,} tokens so far does not match the grammar"
            raise GrammarFailure(message)
        other.num_taken = self.num_taken + taken
        return other

    def new_matcher(self, end_ids: Sequence[int], cpu_clock: CpuClock) -> "Matcher":
        """`end_ids`: the tokens that end the completion; `cpu_clock`: CPU seconds of the calling thread."""
        return Matcher(self._first.deep_copy(), self._size, end_ids, self._limits.step_cpu_s, cpu_clock)


class Matcher:
    """One completion. After a GrammarFailure it is of no more use."""

    def __init__(
        self, matcher: "LLMatcher", size: int, end_ids: Sequence[int], step_cpu_s: float, cpu_clock: CpuClock
    ) -> None:
        self._matcher = matcher
        self._words = (ctypes.c_uint32 * (-(-size // 32)))()
        self._end_ids = tuple(end_ids)
        self._step_cpu_s = step_cpu_s
        self._cpu_clock = cpu_clock
        self._moving_s = 0.0

    def allowed(self) -> bytes:
        """A bit for each token id, the lowest first in each little-endian word of 32.

        End tokens are allowed exactly when the text so far is complete. Raises GrammarFailure.
        """
        return self._allowed_by(self._matcher)

    def allowed_along(self, draft: Sequence[int]) -> list[bytes]:
        """`allowed()` before each token of the draft, and behind the last. Nothing is allowed behind a token that the
        grammar refuses, or cannot be followed any further. The matcher stays where it is."""
        found = [self.allowed()]
        ahead = self._matcher.deep_copy()
        for token in draft:
            if not found[-1][token // 8] >> token % 8 & 1 or token in self._end_ids:
                break
            try:
                if not ahead.consume_token(token):
                    break
                found.append(self._allowed_by(ahead))
            except GrammarFailure:  # of its own accord the request will come here, or not
                break
        return found + [bytes(len(found[0]))] * (len(draft) + 1 - len(found))

    def _allowed_by(self, matcher: "LLMatcher") -> bytes:
        begin = self._cpu_clock()
        words = self._words
        matcher.unsafe_compute_mask_ptr(ctypes.addressof(words), ctypes.sizeof(words))
        self._check(matcher)
        is_complete = matcher.is_accepting()
        for token in self._end_ids:
            bit = 1 << (token % 32)
            words[token // 32] = words[token // 32] | bit if is_complete else words[token // 32] & ~bit
        self._check_time(self._cpu_clock() - begin)
        return bytes(words)

    def advance(self, token_id: int) -> None:
        """Takes a token that was sampled; an end token changes nothing. Raises GrammarFailure."""
        if token_id in self._end_ids:
            return
        begin = self._cpu_clock()
        if not self._matcher.consume_token(token_id):
            self._check()
        self._moving_s = self._cpu_clock() - begin

    def advance_all(self, token_ids: Sequence[int]) -> None:
        """Takes several tokens, one by one. Raises GrammarFailure."""
        for token in token_ids:
            self.advance(token)

    def replay(self, token_ids: Sequence[int]) -> None:
        """Takes the tokens of a completion that was interrupted. Raises GrammarFailure."""
        if self._matcher.try_consume_tokens(list(token_ids)) != len(token_ids):
            self._check()
            raise GrammarFailure("the completion so far does not match the grammar")

    def _check(self, matcher: "LLMatcher | None" = None) -> None:
        checked = matcher or self._matcher
        if checked.is_error():
            raise GrammarFailure(plain_message(checked.get_error()))

    def _check_time(self, seconds: float) -> None:
        total = seconds + self._moving_s
        if total > self._step_cpu_s:
            raise GrammarFailure(
                f"the grammar is too complex: one token took {total * 1000:,.0f} ms, "
                f"at most {self._step_cpu_s * 1000:,.0f} ms are allowed"
            )


def plain_message(error: str) -> str:
    """The library's message for a client: one line, of bounded length."""
    if error.startswith("NoExtension"):
        return "no text fits the grammar"
    error = _EXCERPT.split(error.replace("<non-verbose/>", ""), maxsplit=1)[0]
    line = " ".join(error.split())
    return line if len(line) <= _MAX_MESSAGE else line[: _MAX_MESSAGE - 3] + "..."
