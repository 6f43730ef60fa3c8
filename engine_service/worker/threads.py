"""How many threads compute.

Must not know: what they compute.
"""

import os


def num_threads(asked: int) -> int:
    """0: as many as the cores this process may use."""
    return asked or len(os.sched_getaffinity(0))
