"""How the client connects: channel options, and as many connections as its streams need.

Must not know: requests, retries, whether the channels are asyncio's or blocking ones.
"""

import json
import threading
from collections.abc import Callable
from typing import Generic, Self, TypeVar

from tokenwire_client.errors import Cancelled, ErrorCode

DEFAULT_TARGET = "127.0.0.1:50050"
HEALTH_METHOD = "/grpc.health.v1.Health/Check"
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# What servers and proxies commonly allow on one HTTP/2 connection; more would wait in silence.
STREAMS_PER_CONNECTION = 100
MAX_CONNECTIONS = 16

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


class _Slot(Generic[Link]):
    """One connection and the number of its live calls."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.calls = 0


class Lease(Generic[Link]):
    """The right to one call on a connection, until it is released."""

    def __init__(self, slot: _Slot[Link], lock: threading.RLock) -> None:
        self._slot = slot
        self._lock = lock
        self._held = True

    @property
    def link(self) -> Link:
        return self._slot.link

    def release(self) -> None:
        """Idempotent, from any thread."""
        with self._lock:
            if self._held:
                self._held = False
                self._slot.calls -= 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class LinkPool(Generic[Link]):
    """Connections, opened when those before are full; past the last one the least loaded is shared.

    Owns the links until `close` hands them over. Safe to use from several threads.
    """

    def __init__(self, open_link: Callable[[], Link], streams_per_link: int, max_links: int) -> None:
        self._open_link = open_link
        self._streams_per_link = streams_per_link
        self._max_links = max_links
        self._slots: list[_Slot[Link]] = []
        self._closed = False
        # Re-entrant: a lease may be released by the garbage collector, inside `lease`.
        self._lock = threading.RLock()

    def lease(self) -> Lease[Link]:
        """A place on the first connection with room. Raises Cancelled when the pool is closed."""
        with self._lock:
            if self._closed:
                raise Cancelled(ErrorCode.CANCELLED, "the client is closed")
            slot = self._slot_with_room()
            slot.calls += 1
            return Lease(slot, self._lock)

    def _slot_with_room(self) -> _Slot[Link]:
        for slot in self._slots:
            if slot.calls < self._streams_per_link:
                return slot
        if len(self._slots) >= self._max_links:
            return min(self._slots, key=lambda slot: slot.calls)
        self._slots.append(_Slot(self._open_link()))
        return self._slots[-1]

    def calls(self) -> tuple[int, ...]:
        """Live calls of each open connection."""
        with self._lock:
            return tuple(slot.calls for slot in self._slots)

    def close(self) -> list[Link]:
        """No more leases; the links are now the caller's to close. Idempotent."""
        with self._lock:
            self._closed = True
            links = [slot.link for slot in self._slots]
            self._slots.clear()
            return links
