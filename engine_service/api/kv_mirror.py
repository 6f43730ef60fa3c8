"""A copy of which blocks the engine can reuse, kept while somebody watches, so that watchers never trouble the engine.

Must not know: protobuf, gRPC calls, tokens.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

from engine_service.api.engine_handle import Connection
from engine_service.api.kv_feed import KvFeed
from engine_service.core.kv_events import DIGEST_BYTES, BlocksRemoved, BlockStored, CacheSnapshot, EventsLost, KvEvent

MAX_WATCHERS = 64
MAX_UNREAD_BLOCKS = 65_536
"""A watcher that leaves more unread starts over with what there is by then."""


class KvNews(NamedTuple):
    """What changed, in order: (is stored, digests joined). After `is_reset` nothing told before counts."""

    is_reset: bool
    changes: list[tuple[bool, bytes]]


class KvWatcher:
    """One watcher's unread changes, a bounded number."""

    def __init__(self, mirror: "_Mirror") -> None:
        self._mirror = mirror
        self._changes: list[tuple[bool, bytes]] = []
        self._num_blocks = 0
        self._must_reset = True
        self._has_news = asyncio.Event()
        self._is_over = False

    def reset(self) -> None:
        """What is unread counts no more: the next news is all there is."""
        self._changes.clear()
        self._num_blocks = 0
        self._must_reset = True
        self._has_news.set()

    def add(self, is_stored: bool, digests: bytes, num_blocks: int) -> None:
        if self._must_reset:
            return
        self._num_blocks += num_blocks
        if self._num_blocks > MAX_UNREAD_BLOCKS:
            self.reset()
            return
        self._changes.append((is_stored, digests))
        self._has_news.set()

    def end(self) -> None:
        """The engine is gone: nothing more will come."""
        self._is_over = True
        self._has_news.set()

    async def take(self) -> KvNews | None:
        """Waits for news; None when no more will come."""
        await self._has_news.wait()
        if self._is_over:
            return None
        self._has_news.clear()
        is_reset, self._must_reset = self._must_reset, False
        changes = [(True, b"".join(self._mirror.blocks))] if is_reset else self._changes
        self._changes, self._num_blocks = [], 0
        return KvNews(is_reset, changes)


class _Mirror:
    """The blocks of one life of the engine, oldest first, and who is told of their changes."""

    def __init__(self, feed: KvFeed, connection: Connection) -> None:
        self.connection = connection
        self.blocks: dict[bytes, None] = {}
        self.watchers: set[KvWatcher] = set()
        self._feed = feed
        self._has_begun = False

    @property
    def has_begun(self) -> bool:
        """The engine's snapshot has come."""
        return self._has_begun

    def on_events(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            match event:
                case CacheSnapshot():
                    self._begin(event)
                case EventsLost():
                    self._has_begun = False
                    self._feed.ask(self.connection.commands)
                case BlockStored() if self._has_begun:
                    self.blocks[event.digest] = None
                    self._tell(True, event.digest, 1)
                case BlocksRemoved() if self._has_begun:
                    for digest in event.digests:
                        self.blocks.pop(digest, None)
                    self._tell(False, b"".join(event.digests), len(event.digests))

    def _begin(self, snapshot: CacheSnapshot) -> None:
        joined = snapshot.digests
        self.blocks = dict.fromkeys(
            [joined[place : place + DIGEST_BYTES] for place in range(0, len(joined), DIGEST_BYTES)]
        )
        self._has_begun = True
        for watcher in self.watchers:
            watcher.reset()

    def _tell(self, is_stored: bool, digests: bytes, num_blocks: int) -> None:
        for watcher in self.watchers:
            watcher.add(is_stored, digests, num_blocks)


class KvWatchers:
    """All watchers of the engine; the first one of a life of it begins the copy, the last one ends it."""

    def __init__(self, feed: KvFeed) -> None:
        self._feed = feed
        self._mirror: _Mirror | None = None
        self._listening = ExitStack()
        self._num_open = 0

    @property
    def is_full(self) -> bool:
        return self._num_open >= MAX_WATCHERS

    @contextmanager
    def watching(self, connection: Connection) -> Iterator[KvWatcher]:
        """Watches this life of the engine; the first news is everything there is."""
        mirror = self._mirror_of(connection)
        watcher = KvWatcher(mirror)
        mirror.watchers.add(watcher)
        if mirror.has_begun:
            watcher.reset()
        ended = asyncio.create_task(connection.ended.wait())
        ended.add_done_callback(lambda _: watcher.end())
        self._num_open += 1
        try:
            yield watcher
        finally:
            self._num_open -= 1
            ended.cancel()
            mirror.watchers.discard(watcher)
            if not mirror.watchers and self._mirror is mirror:
                self._mirror = None
                self._listening.close()

    def _mirror_of(self, connection: Connection) -> _Mirror:
        if self._mirror is None or self._mirror.connection is not connection:
            self._listening.close()  # of an engine that is gone
            self._mirror = _Mirror(self._feed, connection)
            listening = self._feed.listening(connection.commands, self._mirror.on_events, with_tokens=False)
            self._listening.enter_context(listening)
        return self._mirror
