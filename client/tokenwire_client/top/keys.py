"""Single keys from a terminal, without Enter.

Must not know: what keys mean.
"""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager

_ESCAPE = "\x1b"
_MOST_BYTES = 1024


class Keys:
    """Reads from a terminal; without one it only waits."""

    def __init__(self, terminal: int | None) -> None:
        self._terminal = terminal

    def wait(self, seconds: float) -> str:
        """The key that was pressed within that time, or nothing. Arrows, and the wheel that some terminals make
        arrows of, are an escape with more behind it: no key."""
        ends = time.monotonic() + max(0.0, seconds)
        if self._terminal is not None and select.select([self._terminal], [], [], max(0.0, seconds))[0]:
            typed = os.read(self._terminal, _MOST_BYTES).decode(errors="replace")
            if typed:
                return "" if len(typed) > 1 and typed.startswith(_ESCAPE) else typed[0]
        time.sleep(max(0.0, ends - time.monotonic()))  # also where the terminal has gone
        return ""


@contextmanager
def single_keys() -> Iterator[Keys]:
    """The terminal gives each key at once and shows none, until the block ends."""
    if not sys.stdin.isatty():
        yield Keys(None)
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield Keys(sys.stdin.fileno())
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
