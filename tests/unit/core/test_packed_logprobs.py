"""Packed log probabilities are the entries they were made of."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.outcome import PositionLogprobs
from engine_service.core.packed_logprobs import PackedLogprobs

PAIR = st.tuples(st.integers(0, 2**31 - 1), st.floats(max_value=0.0))
ENTRIES = st.lists(
    st.builds(PositionLogprobs, st.none() | PAIR, st.integers(0, 2**40), st.lists(PAIR, max_size=4).map(tuple))
)


@given(ENTRIES, ENTRIES, st.slices(10))
def test_entries_come_out_as_they_went_in(
    first: list[PositionLogprobs], more: list[PositionLogprobs], part: slice
) -> None:
    packed = PackedLogprobs(first)
    packed.extend(more)
    entries = [*first, *more]
    assert list(packed) == entries
    assert packed == tuple(entries)
    assert (len(packed), bool(packed)) == (len(entries), bool(entries))
    assert packed[part] == tuple(entries[part])
    assert pickle.loads(pickle.dumps(packed)) == packed
    assert packed.num_logprobs == sum(1 + len(entry.top) for entry in entries)


def test_a_long_prompt_s_take_little_room_in_the_mailbox() -> None:
    entry = PositionLogprobs((5, -0.5), 2, tuple((token, -0.25) for token in range(20)))
    packed = PackedLogprobs([entry] * 8000)
    assert len(pickle.dumps(packed)) < 13 * packed.num_logprobs
