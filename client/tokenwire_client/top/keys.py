"""Single keys from a terminal, without Enter.

Must not know: what keys mean.
"""

import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager


class Keys:
    """Reads from standard input when that is a terminal; elsewhere it only waits."""

    def __init__(self, is_terminal: bool) -> None:
        self._is_terminal = is_terminal

    def wait(self, seconds: float) -> str:
        """The key that was pressed within that time, or nothing after it."""
        if not self._is_terminal:
            time.sleep(max(0.0, seconds))
            return ""
        readable, _, _ = select.select([sys.stdin], [], [], max(0.0, seconds))
        return sys.stdin.read(1) if readable else ""


@contextmanager
def single_keys() -> Iterator[Keys]:
    """The terminal gives each key at once and shows none, until the block ends."""
    if not sys.stdin.isatty():
        yield Keys(is_terminal=False)
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield Keys(is_terminal=True)
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
