"""When a session is told of the engine's load, and what: at most every so often, and always the last word.

Must not know: protobuf, gRPC calls, requests.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine_service.api.engine_handle import EngineHandle
from engine_service.core.stats import EngineStats

INTERVAL_SECONDS = 0.05
# So many looked-up tokens weigh as much as all before them.
_MEMORY_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class LoadFigures:
    """`queued_uncached_tokens`: prompt tokens of waiting requests, less the share that recent ones found cached."""

    running: int
    waiting: int
    queued_uncached_tokens: int
    total_blocks: int
    used_blocks: int
    free_blocks: int
    cached_blocks: int


class CachedShare:
    """Of the prompt tokens looked up lately, the share that the prefix cache had."""

    def __init__(self) -> None:
        self.value = 0.0
        self._cached = 0
        self._looked_up = 0

    def update(self, stats: EngineStats) -> float:
        looked_up, cached = stats.looked_up_tokens - self._looked_up, stats.cached_tokens - self._cached
        if looked_up < 0:  # another life of the engine
            self.value, looked_up, cached = 0.0, stats.looked_up_tokens, stats.cached_tokens
        self._looked_up, self._cached = stats.looked_up_tokens, stats.cached_tokens
        if looked_up:
            weight = looked_up / (looked_up + _MEMORY_TOKENS)
            self.value += weight * (cached / looked_up - self.value)
        return self.value


class LoadNews:
    """For one session. `wake` is called when `take` has something; nothing polls, and a step costs one comparison."""

    def __init__(self, handle: EngineHandle, wake: Callable[[], None], interval_s: float = INTERVAL_SECONDS) -> None:
        self._handle = handle
        self._wake = wake
        self._interval_s = interval_s
        self._share = CachedShare()
        self._timer: asyncio.TimerHandle | None = None
        self._is_due = False
        self._last_time = 0.0
        self._last: LoadFigures | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The first figures are due at once."""
        self._handle.report_listeners.append(self._on_report)
        self._on_report()
        try:
            yield
        finally:
            self._handle.report_listeners.remove(self._on_report)
            if self._timer is not None:
                self._timer.cancel()

    def take(self) -> LoadFigures | None:
        """What to tell now, if anything."""
        connection = self._handle.current
        if not self._is_due or connection is None:
            return None
        self._is_due = False
        self._last_time = asyncio.get_running_loop().time()
        figures = _figures(connection.stats, self._share.update(connection.stats))
        if figures == self._last:
            return None
        self._last = figures
        return figures

    def _on_report(self) -> None:
        if self._timer is None and not self._is_due:
            self._timer = asyncio.get_running_loop().call_at(self._last_time + self._interval_s, self._become_due)

    def _become_due(self) -> None:
        self._timer = None
        self._is_due = True
        self._wake()


def _figures(stats: EngineStats, cached_share: float) -> LoadFigures:
    return LoadFigures(
        running=stats.running,
        waiting=stats.waiting,
        queued_uncached_tokens=round(stats.waiting_tokens * (1.0 - cached_share)),
        total_blocks=stats.total_blocks,
        used_blocks=stats.used_blocks,
        free_blocks=stats.free_blocks,
        cached_blocks=stats.cached_blocks,
    )
