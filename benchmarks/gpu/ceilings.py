"""What the device can do at most: bytes it moves and products it forms, measured, not read from a data sheet.

Must not know: models.
"""

from dataclasses import dataclass

import torch

from benchmarks.gpu.stopwatch import Stopwatch

_COPIED_BYTES = {"cuda": 4 * 1024**3, "cpu": 16 * 1024**2}
_MATRIX_SIDE = {"cuda": 8192, "cpu": 256}
_REPEATS = 10


@dataclass(frozen=True, slots=True)
class Ceilings:
    """`bandwidth`: bytes a second of a large copy, those read and those written. `matrix_rate`: operations a second."""

    bandwidth: float
    matrix_rate: float


def measure(device: torch.device, dtype: torch.dtype, watch: Stopwatch) -> Ceilings:
    """On random numbers: zeros can be faster."""
    source = torch.randint(0, 255, (_COPIED_BYTES[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_seconds = watch.seconds(lambda: target.copy_(source), _REPEATS)
    bandwidth = 2 * source.nbytes / copy_seconds
    side = _MATRIX_SIDE[device.type]
    left, right = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    return Ceilings(bandwidth, 2 * side**3 / watch.seconds(lambda: left @ right, _REPEATS))
