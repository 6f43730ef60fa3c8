"""What a process asks of the interpreter and of the kernel's scheduler once, at its start.

Must not know: what the process does.
"""

import ctypes
import gc
import os
import struct
import sys

# A process of ours that passes tokens on works for some 100 us at a time; the kernel's default turn is 1-3 ms.
SHORT_TURN_NANOSECONDS = 100_000
# Objects made between two collections of the young: the default of 700 is reached several times in a step.
YOUNG_OBJECTS = 20_000

_SCHED_SETATTR_NUMBER = {"x86_64": 314, "aarch64": 274}
_SCHED_OTHER = 0
# struct sched_attr: size, policy, flags, nice, priority, runtime, deadline, period, least and greatest clamp.
_SCHED_ATTR = struct.Struct("=IIQiIQQQII")


def keep_start_up_objects() -> None:
    """Call once everything is built: what exists now is never looked at by the garbage collector again.

    A collection that walks the modules of a service takes tens of milliseconds, in the middle of a step.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)


def ask_for_short_turns(thread_id: int = 0) -> bool:
    """Lets a thread (0: this one) run as soon as it has something to do, even beside threads that compute.

    It gives no more time than before, only shorter turns that come earlier; its niceness stays. Threads and
    processes that it starts inherit it. False where the kernel (Linux before 6.12, others) does not know of it.
    """
    return _set_turn(thread_id, SHORT_TURN_NANOSECONDS)


def ask_for_default_turns(thread_id: int = 0) -> bool:
    """Takes back what was asked for, or inherited."""
    return _set_turn(thread_id, 0)


def _set_turn(thread_id: int, nanoseconds: int) -> bool:
    number = _SCHED_SETATTR_NUMBER.get(os.uname().machine) if sys.platform == "linux" else None
    if number is None or os.sched_getscheduler(thread_id) != os.SCHED_OTHER:
        return False
    nice = os.getpriority(os.PRIO_PROCESS, thread_id)
    attributes = _SCHED_ATTR.pack(_SCHED_ATTR.size, _SCHED_OTHER, 0, nice, 0, nanoseconds, 0, 0, 0, 0)
    return bool(ctypes.CDLL(None).syscall(number, thread_id, attributes, 0) == 0)
