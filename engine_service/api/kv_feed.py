"""Passes the engine's news of its prefix cache on; the engine is asked only while somebody listens.

Must not know: who listens, protobuf, gRPC calls.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from engine_service.core.kv_events import KvEvent
from engine_service.loop.messages import WatchKvEvents

Listener = Callable[[Sequence[KvEvent]], None]


class CommandSink(Protocol):
    """Where commands go: the front's end of the mailbox."""

    def send(self, command: object, *, always: bool = False) -> bool: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Ear:
    listener: Listener
    with_tokens: bool


class KvFeed:
    """Every listener is told everything; a snapshot that one of them asks for comes to all."""

    def __init__(self) -> None:
        self._ears: list[_Ear] = []

    @contextmanager
    def listening(self, commands: CommandSink, listener: Listener, *, with_tokens: bool) -> Iterator[None]:
        """`listener` is told from now on, beginning with a snapshot; it may get events from before that first."""
        ear = _Ear(listener, with_tokens)
        self._ears.append(ear)
        self.ask(commands)
        try:
            yield
        finally:
            self._ears.remove(ear)
            if not self._ears:
                commands.send(WatchKvEvents(False), always=True)

    def ask(self, commands: CommandSink) -> None:
        """For a new snapshot."""
        commands.send(WatchKvEvents(True, any(ear.with_tokens for ear in self._ears)), always=True)

    def tell(self, events: Sequence[KvEvent]) -> None:
        for ear in tuple(self._ears):
            ear.listener(events)
