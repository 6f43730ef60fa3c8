"""The requests of a load test: what each asks and how it is left.

Request number k is a function of (settings, seed, k), so every target gets the same ones with the same seed.
Must not know: when they are sent, targets.
"""

import bisect
import functools
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenwire_client.load.lengths import MAX_TOKENS, Fixed, Lengths
from tokenwire_client.load.words import text_of

# Mooncake's traces name blocks of so many tokens.
TRACE_BLOCK_TOKENS = 512
# Recorded texts have no counts: about four characters of English are a token.
CHARACTERS_PER_TOKEN = 4
_KEPT_TEXTS = 4096


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request. `cancel_after`: leave it once so many tokens (at least 1) have come; None reads it to its end.
    `prompt_tokens` is what the text should have; the server's own count may differ."""

    number: int
    text: str
    prompt_tokens: int
    max_tokens: int
    tenant: int = 0
    cancel_after: int | None = None


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """A recorded request: seconds from the first one, lengths in tokens, ids of the prompt's blocks (equal ids are
    equal text), or the prompt itself."""

    at: float
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """`prefixes` prompts begin with one of so many common texts of `prefix_tokens` tokens; `input` is what follows.
    `cancel_share` of the requests is left early, after a number of tokens drawn evenly."""

    input: Lengths = field(default_factory=lambda: Fixed(100))
    output: Lengths = field(default_factory=lambda: Fixed(64))
    prefixes: int = 0
    prefix_tokens: int = 0
    cancel_share: float = 0.0
    tenant_weights: Sequence[float] = (1.0,)
    most_input: int = MAX_TOKENS
    most_output: int = MAX_TOKENS

    def __post_init__(self) -> None:
        if not 0 <= self.prefixes <= 100_000 or not 0 <= self.prefix_tokens <= MAX_TOKENS:
            raise ValueError(
                f"{self.prefixes} prefixes of {self.prefix_tokens} tokens: outside 0 to 100000, {MAX_TOKENS}"
            )
        if (self.prefixes > 0) != (self.prefix_tokens > 0):
            raise ValueError("shared prefixes need both a number and a length")
        if not 0 <= self.cancel_share <= 1:
            raise ValueError(f"share of cancelled requests {self.cancel_share:g} is outside [0, 1]")
        if not self.tenant_weights or any(not 0 < weight <= 1e6 for weight in self.tenant_weights):
            raise ValueError("tenants' weights must be in (0, 1000000]")


class Workload:
    """Makes requests, from distributions or from recorded entries (used in order, then from the first again)."""

    def __init__(self, shape: Shape, seed: int, entries: Sequence[TraceEntry] = ()) -> None:
        self._shape = shape
        self._seed = seed
        self._entries = entries
        self._limits = list(itertools.accumulate(shape.tenant_weights))
        # Common texts are made once; bounded, since a trace may name very many blocks.
        self._common = functools.lru_cache(_KEPT_TEXTS)(self._make_common)

    def clipped(self, requests: int) -> int:
        """Of the first so many requests those that were recorded longer than the limits, and are cut to them."""
        shape, entries = self._shape, self._entries
        return sum(
            number < requests and (entry.input_tokens > shape.most_input or entry.output_tokens > shape.most_output)
            for number, entry in enumerate(entries)
        )

    def request(self, number: int) -> LoadRequest:
        source = random.Random(f"request-{self._seed}-{number}")  # noqa: S311 (no secret)
        text, prompt_tokens, output = self._recorded(number, source) if self._entries else self._drawn(source)
        tenant = bisect.bisect_right(self._limits, source.random() * self._limits[-1])
        is_left = source.random() < self._shape.cancel_share
        return LoadRequest(
            number=number,
            text=text,
            prompt_tokens=prompt_tokens,
            max_tokens=output,
            tenant=min(tenant, len(self._limits) - 1),
            cancel_after=source.randint(1, max(1, output - 1)) if is_left else None,
        )

    def _drawn(self, source: random.Random) -> tuple[str, int, int]:
        shape = self._shape
        own = min(shape.input.draw(source), shape.most_input)
        output = min(shape.output.draw(source), shape.most_output)
        if not shape.prefixes:
            return text_of(own, source), own, output
        prefix = self._common("prefix", source.randrange(shape.prefixes), shape.prefix_tokens)
        return prefix + text_of(own, source), shape.prefix_tokens + own, output

    def _recorded(self, number: int, source: random.Random) -> tuple[str, int, int]:
        entry = self._entries[number % len(self._entries)]
        length = min(entry.input_tokens, self._shape.most_input)
        output = min(entry.output_tokens, self._shape.most_output)
        if entry.text is not None:
            # How many tokens it has is known by their usual length alone.
            return entry.text[: length * CHARACTERS_PER_TOKEN], length, output
        text, left = "", length
        for block in entry.block_ids:
            part = min(left, TRACE_BLOCK_TOKENS)
            text += self._common("block", block, part)
            left -= part
        return text + text_of(left, source), length, output

    def _make_common(self, kind: str, number: int, tokens: int) -> str:
        return text_of(tokens, random.Random(f"{kind}-{self._seed}-{number}"))  # noqa: S311 (no secret)
