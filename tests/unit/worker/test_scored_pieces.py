"""How chunks of prompts with log probabilities are cut: every position once, every wanted token once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.plan import Chunk
from engine_service.worker.scored_pieces import PIECE_TOKENS, ScoredPrompt, cut


def positions(chunk: Chunk) -> list[int]:
    return list(range(chunk.start, chunk.start + chunk.length))


@given(
    length=st.integers(1, 400),
    known=st.integers(1, 400),
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8),
)
def test_each_position_is_computed_and_scored_once(length: int, known: int, sizes: list[int]) -> None:
    """Over all chunks of a prompt; those already known are not scored again."""
    prompt = ScoredPrompt(known, length, 2) if known < length else None
    computed, scored, start = [], [], 0
    for size in [*sizes, length]:
        size = min(size, length - start)
        if size == 0:
            break
        chunk = Chunk(1, start, size, (9,), start + size == length)
        pieces, rest = cut([chunk], lambda _: prompt)
        for piece in pieces:
            assert 1 <= piece.chunk.length <= PIECE_TOKENS
            assert not piece.chunk.samples
            computed += positions(piece.chunk)
            scored += [one + 1 for one in positions(piece.chunk) if one >= piece.first_scored]
        for left in rest:
            computed += positions(left)
            assert left.samples == (left.start + left.length == length)
        start += size
    assert computed == list(range(length))
    assert scored == (list(range(known, length)) if prompt else [])


@pytest.mark.parametrize("place", [0, 1, 2])
def test_neighbours_keep_their_order(place: int) -> None:
    chunks = [Chunk(1, 30, 1, (), True), Chunk(2, 0, 8, (), True), Chunk(3, 0, 5, (), False)]
    wanted = {chunks[place].request_id: ScoredPrompt(1, 31 if place == 0 else 8, 0)}
    _, rest = cut(chunks, wanted.get)
    others = [chunk for number, chunk in enumerate(chunks) if number != place]
    assert [chunk for chunk in rest if chunk.request_id not in wanted] == others
