"""What happens to the blocks of the prefix index, told to whoever watches: block by block, with their tokens.

Must not know: who watches, the pool, requests, torch.
"""

from collections.abc import Iterable
from typing import NamedTuple


class BlockStored(NamedTuple):
    """A full block can be found from now on. `name` is an int64; `parent` names the block before it."""

    name: int
    parent: int | None
    token_ids: tuple[int, ...]


class BlocksRemoved(NamedTuple):
    """These can be found no longer."""

    names: tuple[int, ...]


class CacheSnapshot(NamedTuple):
    """All blocks that can be found now, parents before children: what was told before counts no more."""

    blocks: tuple[BlockStored, ...]


class EventsLost(NamedTuple):
    """More happened than could be kept: only a new snapshot helps."""


KvEvent = BlockStored | BlocksRemoved | CacheSnapshot | EventsLost


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
