"""Which padded sizes get a graph, and which one a step takes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.worker.cuda.graph_sizes import fitting_size, graph_sizes


@pytest.mark.parametrize(
    ("requests", "largest", "sizes"),
    [
        (1, 512, (1,)),
        (3, 512, (1, 2, 3)),
        (8, 512, (1, 2, 4, 8)),
        (9, 512, (1, 2, 4, 8, 9)),
        (64, 512, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)),
        (100, 80, (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80)),
        (64, 0, ()),
    ],
)
def test_sizes(requests: int, largest: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(requests, largest) == sizes


def test_one_size_for_all_where_rows_must_not_change_the_rounding() -> None:
    assert graph_sizes(256, 512, only_largest=True) == (256,)


@settings(deadline=None)
@given(requests=st.integers(1, 3000), largest=st.integers(0, 3000))
def test_every_step_within_the_bounds_has_a_graph_with_little_padding(requests: int, largest: int) -> None:
    sizes = graph_sizes(requests, largest)
    bound = min(requests, largest)
    assert list(sizes) == sorted(set(sizes))
    assert fitting_size(sizes, bound + 1) is None
    for count in {1, 5, bound // 3, bound - 1, bound} & set(range(1, bound + 1)):
        size = fitting_size(sizes, count)
        assert size is not None
        assert count <= size <= bound
        assert size < max(2 * count, count + 16) or size > 1024
