"""Hands the engine's news of its prefix cache to those who subscribed; the engine is asked only while one has.

Must not know: protobuf, gRPC calls.
"""

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from engine_service.api.engine_handle import Connection, EngineHandle
from engine_service.core.kv_events import CacheSnapshot, EventsLost, KvEvent, KvEventLog
from engine_service.loop.messages import WatchKvEvents

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
            if self._has_begun:
                self._log.add((event,))
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


class KvFeed:
    """Owns the handle's `kv_listener`."""

    def __init__(self, handle: EngineHandle) -> None:
        self._subscriptions: set[Subscription] = set()
        handle.kv_listener = self._tell

    @property
    def is_full(self) -> bool:
        return len(self._subscriptions) >= MAX_SUBSCRIPTIONS

    @contextmanager
    def subscribed(self, connection: Connection) -> Iterator[Subscription]:
        """A subscription to this life of the engine. The snapshot it begins with comes to the others too."""
        subscription = Subscription()
        ended = asyncio.create_task(connection.ended.wait())
        ended.add_done_callback(lambda _: subscription.end())
        self._subscriptions.add(subscription)
        connection.commands.send(WatchKvEvents(True), always=True)
        try:
            yield subscription
        finally:
            self._subscriptions.discard(subscription)
            ended.cancel()
            if not self._subscriptions:
                connection.commands.send(WatchKvEvents(False), always=True)

    def _tell(self, events: Sequence[KvEvent]) -> None:
        for subscription in self._subscriptions:
            subscription.add(events)
