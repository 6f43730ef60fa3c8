"""Hands the engine's news of its prefix cache to those who subscribed, with tokens; salted blocks are left out.

Must not know: protobuf, gRPC calls.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine_service.api.engine_handle import Connection
from engine_service.api.kv_feed import KvFeed
from engine_service.core.kv_events import BlocksRemoved, BlockStored, CacheSnapshot, EventsLost, KvEvent, KvEventLog

MAX_SUBSCRIPTIONS = 16


class Subscription:
    """One reader's unread events, a bounded number; they begin with a snapshot."""

    def __init__(self) -> None:
        self._log = KvEventLog()
        self._has_news = asyncio.Event()
        self._has_begun = False
        self._is_over = False

    def add(self, events: Sequence[KvEvent]) -> None:
        for event in events:
            self._has_begun = self._has_begun or isinstance(event, CacheSnapshot | EventsLost)
            if self._has_begun and (public := _public(event)) is not None:
                self._log.add((public,))
                self._has_news.set()

    def end(self) -> None:
        """The engine is gone: nothing more will come."""
        self._is_over = True
        self._has_news.set()

    async def take(self) -> tuple[KvEvent, ...]:
        """Waits for events; nothing when no more will come."""
        await self._has_news.wait()
        if self._is_over:
            return ()
        self._has_news.clear()
        return self._log.take()


def _public(event: KvEvent) -> KvEvent | None:
    """The event as far as it is about blocks without a salt."""
    is_salted = isinstance(event, BlockStored | BlocksRemoved) and event.is_salted
    return None if is_salted else event


class Subscriptions:
    """The open subscriptions to a feed."""

    def __init__(self, feed: KvFeed) -> None:
        self._feed = feed
        self._num_open = 0

    @property
    def is_full(self) -> bool:
        return self._num_open >= MAX_SUBSCRIPTIONS

    @contextmanager
    def subscribed(self, connection: Connection) -> Iterator[Subscription]:
        """A subscription to this life of the engine. The snapshot it begins with comes to the others too."""
        subscription = Subscription()
        ended = asyncio.create_task(connection.ended.wait())
        ended.add_done_callback(lambda _: subscription.end())
        self._num_open += 1
        try:
            with self._feed.listening(connection.commands, subscription.add, with_tokens=True):
                yield subscription
        finally:
            self._num_open -= 1
            ended.cancel()
