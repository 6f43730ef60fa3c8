"""Which rows of a draft count, against a plain walk."""

from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.plan import Chunk
from engine_service.worker.verification import DraftRows, draft_rows, verify

TOKENS = st.integers(0, 2)


@given(
    drafts=st.lists(st.lists(TOKENS, max_size=5), max_size=5),
    samples=st.lists(TOKENS, min_size=30, max_size=30),
    bad=st.sets(st.integers(0, 29), max_size=4),
)
def test_what_counts_is_what_would_have_come_one_by_one(
    drafts: list[list[int]], samples: list[int], bad: set[int]
) -> None:
    chunks = [Chunk(name, 9, 1 + len(draft), (), True, True, tuple(draft)) for name, draft in enumerate(drafts)]
    rows = draft_rows(chunks)
    verified = verify(rows, samples, bad)
    first, accepted = 0, dict(verified.accepted)
    for name, draft in enumerate(drafts):
        count = 0
        while (
            count < len(draft)
            and {first + count, first + count + 1}.isdisjoint(bad)
            and samples[first + count] == draft[count]
        ):
            count += 1
        assert accepted.get(name, ()) == tuple(draft[:count])
        all_rows = set(range(first, first + len(draft) + 1))
        assert verified.before & all_rows == set(range(first, first + count))
        assert verified.void & all_rows == set(range(first + count + 1, first + len(draft) + 1))
        first += len(draft) + 1


def test_rows_of_chunks_that_do_not_sample_are_none() -> None:
    chunks = [
        Chunk(1, 0, 1, (), True),
        Chunk(2, 3, 3, (), True, True, (5, 6)),
        Chunk(3, 0, 8, (), False),
        Chunk(4, 1, 2, (), True, True, (7,)),
    ]
    assert draft_rows(chunks) == (DraftRows(2, 1, (5, 6)), DraftRows(4, 4, (7,)))
    assert draft_rows(chunks[:1]) == ()
