"""How the client connects: channel options, and as many connections as its streams need.

Must not know: requests, retries, whether the channels are asyncio's or blocking ones.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, Self, TypeVar

from tokenwire_client.errors import Cancelled, ErrorCode, invalid

DEFAULT_TARGET = "127.0.0.1:50050"
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# What servers and proxies commonly allow on one HTTP/2 connection; more would wait in silence.
STREAMS_PER_CONNECTION = 100
MAX_CONNECTIONS = 16
REST_S = 1.0

CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # The attempts are counted by RetryPolicy alone.
    ("grpc.enable_retries", 0),
    # A connection of its own per channel, instead of one shared by equal channels.
    ("grpc.use_local_subchannel_pool", 1),
    # A service that restarts is found again within the first retries.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Several replicas behind one name share the work.
    ("grpc.service_config", json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})),
)

Link = TypeVar("Link")


def addresses_of(target: str | Sequence[str]) -> tuple[str, ...]:
    """One or more gRPC names; several may also come as one text, with commas between them."""
    if isinstance(target, str):
        is_list_of_grpc = target.startswith(("ipv4:", "ipv6:"))
        target = (target,) if is_list_of_grpc else target.split(",")
    names = tuple(name.strip() for name in target)
    if not names or not all(names):
        raise invalid("target", f"must name a service; got {target!r}")
    return names


def key_metadata(api_key: str | None) -> tuple[tuple[str, str], ...]:
    """What each call carries to say who asks. Raises InvalidRequest for a key that cannot go on the wire."""
    if api_key is None:
        return ()
    if not api_key or not api_key.isascii() or not api_key.isprintable():
        raise invalid("api_key", "is empty or holds other than printable ASCII")
    return (("authorization", f"Bearer {api_key}"),)


class _Slot(Generic[Link]):
    """One connection to an address and the number of its live calls."""

    def __init__(self, link: Link, address: int) -> None:
        self.link = link
        self.address = address
        self.calls = 0


class Lease(Generic[Link]):
    """The right to one call on a connection, until it is released."""

    def __init__(self, pool: "LinkPool[Link]", slot: _Slot[Link]) -> None:
        self._pool = pool
        self._slot = slot
        self._held = True

    @property
    def link(self) -> Link:
        return self._slot.link

    def release(self) -> None:
        """Idempotent, from any thread."""
        with self._pool.lock:
            if self._held:
                self._held = False
                self._slot.calls -= 1

    def retire(self) -> bool:
        """Its connection leads to a service that cannot serve now: no new calls there, those that run go on.

        True when another address may do better.
        """
        return self._pool.retire(self._slot)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class LinkPool(Generic[Link]):
    """Connections to one address or to several that serve the same. Safe to use from several threads.

    A call goes to the address with the fewest live calls, on a connection that was opened when those before were
    full; past `max_links` of an address its least loaded one is shared. An address that could not serve rests for
    REST_S, unless all do. Owns the links until `close` hands them over; retired ones end by `close_link`.
    """

    def __init__(
        self,
        openers: Sequence[Callable[[], Link]],
        streams_per_link: int,
        max_links: int,
        close_link: Callable[[Link], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._openers = openers
        self._streams_per_link = streams_per_link
        self._max_links = max_links
        self._close_link = close_link
        self._clock = clock
        self._slots: list[_Slot[Link]] = []
        self._retired: list[_Slot[Link]] = []
        self._rests_until = [0.0] * len(openers)
        self._turn = 0
        self._closed = False
        # Re-entrant: a lease may be released by the garbage collector, inside `lease`.
        self.lock = threading.RLock()

    def lease(self) -> Lease[Link]:
        """A place on a connection with room. Raises Cancelled when the pool is closed."""
        with self.lock:
            if self._closed:
                raise Cancelled(ErrorCode.CANCELLED, "the client is closed")
            self._close_retired()
            slot = self._slot_with_room(self._choose_address())
            slot.calls += 1
            return Lease(self, slot)

    def retire(self, slot: _Slot[Link]) -> bool:
        """See `Lease.retire`."""
        with self.lock:
            if slot in self._slots:
                self._slots.remove(slot)
                self._retired.append(slot)
            now = self._clock()
            self._rests_until[slot.address] = now + REST_S
            return any(until <= now for until in self._rests_until)

    def _close_retired(self) -> None:
        for slot in [slot for slot in self._retired if slot.calls == 0]:
            self._retired.remove(slot)
            self._close_link(slot.link)

    def _choose_address(self) -> int:
        now = self._clock()
        calls = [0] * len(self._openers)
        for slot in (*self._slots, *self._retired):
            calls[slot.address] += slot.calls
        self._turn += 1

        def rank(place: int) -> tuple[float, int, int]:
            # Of those that rest, the one whose rest ends first; equal ones take turns.
            return max(self._rests_until[place] - now, 0.0), calls[place], (place + self._turn) % len(calls)

        return min(range(len(calls)), key=rank)

    def _slot_with_room(self, address: int) -> _Slot[Link]:
        slots = [slot for slot in self._slots if slot.address == address]
        for slot in slots:
            if slot.calls < self._streams_per_link:
                return slot
        if len(slots) >= self._max_links:
            return min(slots, key=lambda slot: slot.calls)
        self._slots.append(_Slot(self._openers[address](), address))
        return self._slots[-1]

    def calls(self) -> tuple[int, ...]:
        """Live calls of each connection that takes new ones."""
        with self.lock:
            return tuple(slot.calls for slot in self._slots)

    def close(self) -> list[Link]:
        """No more leases; the links are now the caller's to close. Idempotent."""
        with self.lock:
            self._closed = True
            links = [slot.link for slot in (*self._slots, *self._retired)]
            self._slots.clear()
            self._retired.clear()
            return links
