"""Single keys, from a pseudo-terminal."""

import os
import pty
import time
import tty
from collections.abc import Iterator

import pytest

from tokenwire_client.top.keys import Keys

SHORT_S = 0.05


@pytest.fixture
def terminal() -> Iterator[tuple[int, Keys]]:
    mine, theirs = pty.openpty()

    tty.setcbreak(theirs)
    yield mine, Keys(theirs)
    os.close(theirs)
    os.close(mine)


@pytest.mark.parametrize(
    ("typed", "key"),
    [("q", "q"), ("qx", "q"), ("\x1b", "\x1b"), ("\x1b[A", ""), ("\x1b[B\x1b[B", ""), ("\x1bOA", ""), ("é", "é")],
)
def test_a_key_is_told_and_arrows_are_none(terminal: tuple[int, Keys], typed: str, key: str) -> None:
    mine, keys = terminal
    os.write(mine, typed.encode())
    assert keys.wait(30.0) == key
    assert keys.wait(0.0) == ""  # what was typed with it is gone


def test_nothing_typed_waits_its_time(terminal: tuple[int, Keys]) -> None:
    for keys in (terminal[1], Keys(None)):
        began = time.monotonic()
        assert keys.wait(SHORT_S) == ""
        assert time.monotonic() - began >= SHORT_S
