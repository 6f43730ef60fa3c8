"""Times work on a device: by its own events where it runs on its own, else by the clock.

Must not know: what the work is.
"""

import statistics
import time
from collections.abc import Callable

import torch


class Stopwatch:
    """Of one device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

    def seconds(self, work: Callable[[], object], repeats: int, warm_ups: int = 2) -> float:
        """Median over `repeats` of the time from the begin of `work` until the device has done it."""
        for _ in range(warm_ups):
            work()
        return statistics.median(self._once(work) for _ in range(repeats))

    def wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def _once(self, work: Callable[[], object]) -> float:
        self.wait()
        begin = time.perf_counter()
        work()
        self.wait()
        return time.perf_counter() - begin
