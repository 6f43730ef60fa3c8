"""How much of each draft was right, once its rows have been sampled.

Row i of a draft was sampled as if its first i guessed tokens were right: by the request's own rules, and by the random
number of the token's own position. So the samples up to and including the first that is not the next guessed token are
what would have come one by one. Must not know: torch, logits, where guesses come from.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass

from engine_service.core.plan import Chunk


@dataclass(frozen=True, slots=True)
class DraftRows:
    """The rows `first` .. `first + len(draft)` of a step verify the draft of a request."""

    request_id: int
    first: int
    draft: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verified:
    """`accepted`: (request id, right tokens) of the drafts that have some; their rows are in `before`. `void` are rows
    behind a wrong guess: whatever was sampled there never happened."""

    accepted: tuple[tuple[int, tuple[int, ...]], ...] = ()
    before: frozenset[int] = frozenset()
    void: frozenset[int] = frozenset()


def draft_rows(chunks: Sequence[Chunk]) -> tuple[DraftRows, ...]:
    """Of a step with these chunks."""
    if not any(chunk.draft for chunk in chunks):
        return ()
    found: list[DraftRows] = []
    row = 0
    for chunk in chunks:
        if chunk.draft:
            found.append(DraftRows(chunk.request_id, row, chunk.draft))
        row += (1 + len(chunk.draft)) * chunk.samples
    return tuple(found)


def verify(drafts: Sequence[DraftRows], tokens: Sequence[int], bad: Container[int]) -> Verified:
    """`tokens` are the samples of all rows; those of `bad` rows are none. A bad row fails its request only where it
    comes first: a draft ends before it."""
    if not drafts:
        return Verified()
    accepted: list[tuple[int, tuple[int, ...]]] = []
    before: set[int] = set()
    void: set[int] = set()
    for rows in drafts:
        count = _num_right(rows, tokens, bad)
        if count:
            accepted.append((rows.request_id, rows.draft[:count]))
        before.update(range(rows.first, rows.first + count))
        void.update(range(rows.first + count + 1, rows.first + len(rows.draft) + 1))
    return Verified(tuple(accepted), frozenset(before), frozenset(void))


def _num_right(rows: DraftRows, tokens: Sequence[int], bad: Container[int]) -> int:
    for count, guessed in enumerate(rows.draft):
        row = rows.first + count
        if row in bad or tokens[row] != guessed or row + 1 in bad:
            return count
    return len(rows.draft)
