"""What metrics are made with: bounded labels and buckets."""

from hypothesis import given
from hypothesis import strategies as st

from service_runtime.metrics import OTHER, BoundedLabel, powers_of_two, seconds_buckets


@given(st.lists(st.text("abc", max_size=2)), st.integers(1, 4))
def test_a_label_has_so_many_values_at_most_and_each_stays_what_it_was(values: list[str], most: int) -> None:
    label = BoundedLabel(most)
    shown = [label.of(value) for value in values]
    assert len(set(shown) - {OTHER}) <= most
    assert [label.of(value) for value in values] == [label.of(value) for value in values]
    for value, first in zip(values, shown, strict=True):
        assert first in (value, OTHER)
        assert first == OTHER or label.of(value) == value
    named = list(dict.fromkeys(value for value in values if value))
    assert all(label.of(value) == value for value in named[:most])


def test_buckets() -> None:
    assert seconds_buckets(0.001, 0.1) == (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)
    assert seconds_buckets(0.5, 10.0) == (0.5, 1.0, 2.5, 5.0, 10.0)
    assert powers_of_two(8) == (1, 2, 4, 8)
