"""For how many decodes there is a graph, and which one a step takes.

Must not know: torch, graphs, requests.
"""

from bisect import bisect_left
from collections.abc import Sequence

# A graph costs a fraction of a second and some memory; a padded row costs what a real one does.
_SMALLEST = (1, 2, 4, 8)
_STEPS = ((64, 8), (256, 16), (1024, 64))


def graph_sizes(max_requests: int, largest: int, *, only_largest: bool = False) -> tuple[int, ...]:
    """Rising, up to the smaller of the two bounds, which is one of them.

    `only_largest`: every decode step has the same number of rows, so that no product of matrices rounds in another way.
    """
    bound = min(max_requests, largest)
    if bound < 1:
        return ()
    if only_largest:
        return (bound,)
    sizes = [size for size in _SMALLEST if size < bound]
    size = _SMALLEST[-1]
    for limit, step in _STEPS:
        while size < limit and size + step < bound:
            size += step
            sizes.append(size)
    return (*sizes, bound)


def fitting_size(sizes: Sequence[int], count: int) -> int | None:
    """The smallest of the rising `sizes` that holds so many rows; None if none does."""
    place = bisect_left(sizes, count)
    return sizes[place] if place < len(sizes) else None
