"""How calls are spread over connections."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenwire_client.channels import Lease, LinkPool, addresses_of
from tokenwire_client.errors import Cancelled, InvalidRequest


def pool(streams: int, links: int) -> tuple[LinkPool[str], list[str]]:
    opened: list[str] = []

    def open_link() -> str:
        opened.append(f"link {len(opened)}")
        return opened[-1]

    return LinkPool([open_link], streams, links, opened.remove), opened


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


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def two_addresses() -> tuple[LinkPool[str], Clock, list[str]]:
    clock, closed = Clock(), list[str]()
    return LinkPool([lambda: "a", lambda: "b"], 9, 9, closed.append, clock), clock, closed


def test_calls_go_to_the_address_with_the_fewest_and_equal_ones_take_turns() -> None:
    pool, _, _ = two_addresses()
    held = [pool.lease() for _ in range(6)]
    assert sorted(lease.link for lease in held) == ["a", "a", "a", "b", "b", "b"]
    one_by_one = []
    for lease in held:
        lease.release()
    for _ in range(4):
        with pool.lease() as lease:
            one_by_one.append(lease.link)
    assert sorted(one_by_one) == ["a", "a", "b", "b"]


def test_an_address_that_could_not_serve_rests_and_comes_back_over_a_new_connection() -> None:
    pool, clock, closed = two_addresses()
    bad = pool.lease()
    other = {"a": "b", "b": "a"}[bad.link]
    assert bad.retire()
    assert [pool.lease().link for _ in range(5)] == [other] * 5
    clock.now += 1.0
    assert closed == [], "a call still runs on the retired connection"
    bad.release()
    assert pool.lease().link == bad.link
    assert closed == [bad.link]


def test_when_all_addresses_rest_the_one_is_tried_whose_rest_ends_first() -> None:
    pool, clock, _ = two_addresses()
    first = pool.lease()
    assert first.retire()
    clock.now += 0.5
    second = pool.lease()
    assert not second.retire()
    assert pool.lease().link == first.link


def test_what_names_several_services() -> None:
    assert addresses_of("a:1") == ("a:1",)
    assert addresses_of("a:1, b:2") == addresses_of(["a:1", "b:2"]) == ("a:1", "b:2")
    assert addresses_of("ipv4:1.1.1.1:1,2.2.2.2:2") == ("ipv4:1.1.1.1:1,2.2.2.2:2",)
    for wrong in ("", "a:1,", []):
        with pytest.raises(InvalidRequest, match="target"):
            addresses_of(wrong)


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
