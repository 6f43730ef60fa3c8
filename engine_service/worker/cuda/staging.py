"""A ring of host memory from which arrays are copied to the device without waiting, and used again only afterwards.

Must not know: what the arrays hold, CUDA (it is given memory, a copy and fences).
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy.typing as npt
import torch

_ALIGNMENT = 64  # bytes; of any type of number


class Fence(Protocol):
    """Marks a place in the device's work."""

    def record(self) -> None:
        """Everything that was begun so far lies before the fence."""
        ...

    def synchronize(self) -> None:
        """Wait until the device has passed the place that was recorded last, if there is one."""
        ...


CopyToDevice = Callable[[torch.Tensor], torch.Tensor]


class StagingRing:
    """One region of memory for each step that may be in flight, and one more, each with a fence behind its copies."""

    def __init__(self, regions: Sequence[torch.Tensor], fences: Sequence[Fence], copy: CopyToDevice) -> None:
        """`regions`: uint8 tensors of host memory from which `copy` may still read when it has returned."""
        self._regions = regions
        self._fences = fences
        self._copy = copy
        self._current = 0
        self._used = 0

    def next_region(self) -> None:
        """What is put from now on belongs to another step: its region is free once its last copies are done."""
        self._fences[self._current].record()
        self._current = (self._current + 1) % len(self._regions)
        self._fences[self._current].synchronize()
        self._used = 0

    def put(self, array: npt.NDArray) -> torch.Tensor | None:
        """The array on the device, or None when this step's region is full."""
        end = self._used + array.nbytes
        region = self._regions[self._current]
        if end > len(region):
            return None
        source = torch.from_numpy(array)
        staged = region[self._used : end].view(source.dtype).view(source.shape)
        staged.copy_(source)
        self._used = -(-end // _ALIGNMENT) * _ALIGNMENT
        return self._copy(staged)
