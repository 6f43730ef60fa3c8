"""How many threads compute on a CPU, and how much a step of theirs should hold.

Must not know: what they compute.
"""

import os

# A CPU computes about as fast for one row as for 8, and then in proportion: with four times as many prompt tokens as
# decodes a step takes about three times as long as with the decodes alone (benchmarks/RESULTS.md).
CPU_PREFILL_PER_DECODE = 4


def num_threads(asked: int, ranks: int = 1) -> int:
    """Of one of the ranks that share them. 0: as many as the cores this process may use."""
    return max(1, (asked or len(os.sched_getaffinity(0))) // ranks)
