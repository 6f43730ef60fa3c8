"""How much memory is free on the device.

Must not know: what it is wanted for.
"""

from pathlib import Path

import psutil
import torch

from engine_service.worker.config import Device

_CGROUP = Path("/sys/fs/cgroup")


def free_memory(device: Device, cgroup: Path = _CGROUP) -> int:
    """Bytes that may still be allocated: of the GPU, or of this host within its control group's limit."""
    if device is Device.CUDA:
        free, _total = torch.cuda.mem_get_info()
        return int(free)
    available = int(psutil.virtual_memory().available)
    limit = _read_number(cgroup / "memory.max")
    used = _read_number(cgroup / "memory.current")
    return available if limit is None or used is None else min(available, max(0, limit - used))


def _read_number(path: Path) -> int | None:
    """The number in a control file; None where there is no such file or it says "max"."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
