"""How long a template may compute: CPU time of the rendering thread.

Must not know: templates' contents, conversations.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

MAX_CPU_S = 2.0


class TookTooLong(Exception):
    """The template has computed for MAX_CPU_S."""


class CpuBudget:
    """Starts with its making; `clock` is the CPU time of the thread, in seconds."""

    def __init__(self, seconds: float = MAX_CPU_S, clock: Callable[[], float] = time.thread_time) -> None:
        self._clock = clock
        self._end = clock() + seconds

    def check(self) -> None:
        """Raises TookTooLong when it is spent."""
        if self._clock() > self._end:
            raise TookTooLong

    @contextmanager
    def watching(self, code: CodeType) -> Iterator[None]:
        """Checks at every line that runs of the module of `code`, and there alone; several times slower.

        What a single operation costs is bounded by the sandbox.
        """

        def on_line(_frame: FrameType, _event: str, _argument: Any) -> Any:
            self.check()
            return on_line

        def on_call(frame: FrameType, _event: str, _argument: Any) -> Any:
            return on_line if frame.f_code.co_filename == code.co_filename else None

        before = sys.gettrace()
        sys.settrace(on_call)  # of this thread
        try:
            yield
        finally:
            sys.settrace(before)
