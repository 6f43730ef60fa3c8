"""Turns and garbage collection of a process, asked of the real kernel and interpreter."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from service_runtime.process_tuning import SHORT_TURN_NANOSECONDS, ask_for_default_turns, ask_for_short_turns

_SCHED = Path("/proc/thread-self/sched")


def _slice() -> int | None:
    """Nanoseconds of this thread's turns, from /proc; None where the kernel does not show them."""
    for line in _SCHED.read_text().splitlines() if _SCHED.exists() else ():
        if line.startswith("se.slice"):
            return int(line.split(":")[1])
    return None


def test_short_turns_are_set_and_taken_back() -> None:
    seen: list[int | None] = []

    def ask() -> None:
        seen.append(_slice())
        if ask_for_short_turns():
            seen.append(_slice())
            ask_for_default_turns()
            seen.append(_slice())

    # In a thread of its own: the turns of the test's thread stay as they are.
    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    if len(seen) == 1 or seen[0] is None:
        pytest.skip("this kernel has no turns of a chosen length, or does not show them")
    before, short, after = seen
    assert short == SHORT_TURN_NANOSECONDS
    assert after == before


def test_niceness_stays() -> None:
    program = (
        "import os; from service_runtime.process_tuning import ask_for_short_turns as ask;"
        "os.nice(7); ask(); print(os.getpriority(os.PRIO_PROCESS, 0))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "7"


def test_start_up_objects_are_left_alone_and_new_garbage_is_still_collected() -> None:
    program = (
        "import gc, weakref; from service_runtime.process_tuning import keep_start_up_objects\n"
        "class Node: pass\n"
        "def cycle():\n"
        "    node = Node(); node.me = node\n"
        "    return weakref.ref(node)\n"
        "keep_start_up_objects()\n"
        "garbage = cycle(); gc.collect()\n"
        "print(gc.get_freeze_count() > 1000, garbage() is None)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["True", "True"]
