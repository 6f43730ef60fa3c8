"""How a process of ours behaves that another process of ours has started.

Must not know: what the process does.
"""

import ctypes
import faulthandler
import signal
import sys

_PR_SET_PDEATHSIG = 1


def live_and_die_with_the_parent(dump_signal: signal.Signals) -> None:
    """The parent drives every stop, and its death ends us. `dump_signal` makes us write our threads' stacks."""
    # A terminal or a supervisor may signal the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    faulthandler.register(dump_signal, all_threads=True)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
