"""How calls are spread over connections."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenwire_client.channels import Lease, LinkPool
from tokenwire_client.errors import Cancelled


def pool(streams: int, links: int) -> tuple[LinkPool[str], list[str]]:
    opened: list[str] = []

    def open_link() -> str:
        opened.append(f"link {len(opened)}")
        return opened[-1]

    return LinkPool(open_link, streams, links), opened


def test_a_connection_is_opened_only_when_those_before_are_full_b122() -> None:
    leased, opened = pool(streams=2, links=3)
    assert opened == []
    assert [leased.lease().link for _ in range(5)] == ["link 0", "link 0", "link 1", "link 1", "link 2"]
    assert leased.calls() == (2, 2, 1)


def test_past_the_last_connection_the_least_loaded_is_shared() -> None:
    leased, opened = pool(streams=1, links=2)
    leases = [leased.lease() for _ in range(4)]
    assert [lease.link for lease in leases] == ["link 0", "link 1", "link 0", "link 1"]
    leases[3].release()
    leases[1].release()
    assert leased.lease().link == "link 1"
    assert opened == ["link 0", "link 1"]


def test_a_released_place_is_used_again_and_released_once() -> None:
    leased, opened = pool(streams=1, links=9)
    with leased.lease() as lease:
        assert leased.calls() == (1,)
    lease.release()
    assert leased.calls() == (0,)
    assert leased.lease().link == "link 0"
    assert opened == ["link 0"]


def test_a_closed_pool_hands_over_its_links_and_refuses() -> None:
    leased, _ = pool(streams=1, links=9)
    held = [leased.lease(), leased.lease()]
    assert leased.close() == ["link 0", "link 1"]
    assert leased.close() == []
    for lease in held:
        lease.release()
    with pytest.raises(Cancelled, match="closed"):
        leased.lease()


@given(st.integers(1, 3), st.integers(1, 4), st.lists(st.integers(-1, 20), max_size=60))
def test_calls_are_counted_whatever_the_order(streams: int, links: int, moves: list[int]) -> None:
    leased, opened = pool(streams, links)
    held: list[Lease[str]] = []
    for move in moves:
        if move < 0 or not held:
            held.append(leased.lease())
        else:
            held.pop(move % len(held)).release()
        assert sum(leased.calls()) == len(held)
        assert len(opened) <= links
        assert max(leased.calls()) <= streams or len(opened) == links
