"""Facts of the machine and the moment, for the result file.

Must not know: targets, results.
"""

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("tokenwire", "torch", "transformers", "grpcio", "aiohttp")
# The instruction sets that decide the speed of a model's arithmetic.
_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")
_JIFFIES_PER_S = os.sysconf("SC_CLK_TCK")


def machine_facts(command: list[str], root: Path) -> dict[str, Any]:
    """What somebody needs to judge or repeat the figures."""
    return {
        "cpu": _cpu_field("model name") or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": [flag for flag in _FLAGS if flag in _cpu_field("flags").split()],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: found for name in _PACKAGES if (found := _version(name))},
        "commit": _git(root, "rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git(root, "status", "--porcelain", "--untracked-files=no")),
        "command": command,
        "load_average": os.getloadavg(),
        "time_utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


class BusyMeter:
    """How busy all cores were since it was made, by whatever process; time stolen by the hypervisor counts, too."""

    def __init__(self) -> None:
        self._all, self._idle = _cpu_times()

    def look(self, own_s: float = 0.0) -> float:
        """The part of all cores' time that was in use, without `own_s` seconds of it: 0 to 1."""
        everything, idle = _cpu_times()
        total = (everything - self._all) / _JIFFIES_PER_S
        busy = total - (idle - self._idle) / _JIFFIES_PER_S
        return max(0.0, busy - own_s) / total if total else 0.0


def _cpu_times() -> tuple[int, int]:
    """(all, idle) jiffies of all cores since boot."""
    numbers = [int(part) for part in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(numbers), numbers[3] + numbers[4]


def _cpu_field(name: str) -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str:
    run = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    return run.stdout.strip()
