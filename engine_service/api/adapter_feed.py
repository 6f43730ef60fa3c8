"""When a session is told of the engine's adapters: when there are other ones than it was told last.

Must not know: gRPC calls, requests.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from engine_service.api.convert import adapter_message
from engine_service.api.engine_handle import EngineHandle
from tokenwire.engine.v1 import engine_pb2


class AdapterFeed:
    """For one session. `wake` is called when `take` has something."""

    def __init__(self, handle: EngineHandle, wake: Callable[[], None]) -> None:
        self._handle = handle
        self._wake = wake
        self._is_due = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        self._handle.adapter_listeners.append(self._on_change)
        try:
            yield
        finally:
            self._handle.adapter_listeners.remove(self._on_change)

    def take(self) -> engine_pb2.LoraAdapters | None:
        """What to tell now, if anything."""
        connection = self._handle.current
        if not self._is_due or connection is None:
            return None
        self._is_due = False
        return engine_pb2.LoraAdapters(adapters=[adapter_message(each) for each in connection.adapters])

    def _on_change(self) -> None:
        self._is_due = True
        self._wake()
