"""Philox against the known answers of its authors and against a version in plain Python integers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.worker.philox import philox4x32, uniforms
from tests.fixtures.reference_sampling import philox_words, uniform

# The vectors published with the Random123 library of the paper's authors: counter, key, answer.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def arrays(values: list[int]) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint64) for value in values)


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter: str, key: str, answer: str) -> None:
    got = philox4x32(arrays(words(counter)), arrays(words(key)))
    assert [int(word[0]) for word in got] == words(answer)
    assert list(philox_words(words(counter), words(key))) == words(answer)


SEEDS = st.integers(-(2**63), 2**63 - 1)
POSITIONS = st.integers(0, 2**40)


@given(st.lists(st.tuples(SEEDS, POSITIONS), min_size=1, max_size=5))
def test_uniforms_equal_the_plain_version(pairs: list[tuple[int, int]]) -> None:
    """B088: any int64 seed."""
    seeds, positions = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
    assert uniforms(seeds, positions).tolist() == [uniform(seed, position) for seed, position in pairs]


def test_uniforms_are_uniform_and_independent() -> None:
    """B079: positions of one seed, and seeds at one position, look like independent uniform numbers."""
    count = 20_000
    index = np.arange(count, dtype=np.int64)
    fixed = np.zeros(count, dtype=np.int64)
    for numbers in (uniforms(fixed, index), uniforms(index, fixed)):
        assert 0.0 <= numbers.min() < numbers.max() < 1.0
        counts, _ = np.histogram(numbers, bins=100, range=(0, 1))
        chi_square = float(((counts - count / 100) ** 2 / (count / 100)).sum())
        assert 50 < chi_square < 170  # 99 degrees of freedom: mean 99, standard deviation 14
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03
