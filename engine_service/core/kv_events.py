"""What happens to the blocks of the prefix index, told to whoever watches: block by block, named by digests.

Must not know: who watches, the pool, requests, torch.
"""

from collections.abc import Iterable
from typing import NamedTuple

DIGEST_BYTES = 16
"""The leading bytes of a block's key that stand for it, and for all before it, outside of the engine."""


class BlockStored(NamedTuple):
    """A full block can be found from now on; `parent` is the block before it.

    `token_ids` is empty where tokens were not asked for, and always for a block of salted requests.
    """

    digest: bytes
    parent: bytes | None
    token_ids: tuple[int, ...]
    is_salted: bool = False


class BlocksRemoved(NamedTuple):
    """These can be found no longer."""

    digests: tuple[bytes, ...]
    is_salted: bool = False


class CacheSnapshot(NamedTuple):
    """All blocks that can be found now, parents before children: what was told before counts no more.

    `digests` are of all, joined. `blocks` are those without a salt, where tokens were asked for, else none.
    """

    digests: bytes
    blocks: tuple[BlockStored, ...] = ()


class EventsLost(NamedTuple):
    """More happened than could be kept: only a new snapshot helps."""


KvEvent = BlockStored | BlocksRemoved | CacheSnapshot | EventsLost


def short_name(digest: bytes) -> int:
    """An int64 that stands for the block, for protocols that have no room for more."""
    return int.from_bytes(digest[:8], "little", signed=True)


class KvEventLog:
    """Events since they were last taken; `max_events` of them at most, and one snapshot."""

    def __init__(self, max_events: int = 65_536) -> None:
        self._max_events = max_events
        self._events: list[KvEvent] = []
        self._is_lost = False

    def add(self, events: Iterable[KvEvent]) -> None:
        for event in events:
            if isinstance(event, CacheSnapshot):
                self._events, self._is_lost = [], False
            if not self._is_lost:
                self._events.append(event)
                self._is_lost = isinstance(event, EventsLost)
            if len(self._events) > self._max_events:
                self._events, self._is_lost = [EventsLost()], True

    def take(self) -> tuple[KvEvent, ...]:
        events = tuple(self._events)
        self._events.clear()
        return events
