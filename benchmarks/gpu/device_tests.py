"""Runs the tests that need a device, in a process of their own.

Must not know: what they test.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]
_SHOWN_LINES = 30


@dataclass(frozen=True, slots=True)
class DeviceTests:
    passed: bool
    output: str


def run_device_tests(timeout_s: float) -> DeviceTests:
    """Plugins that are not installed on the device's machine are not needed by these tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "--noconftest", "tests/gpu"]
    try:
        done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return DeviceTests(False, f"the tests took more than {timeout_s:.0f} s")
    lines = (done.stdout + done.stderr).strip().splitlines()
    return DeviceTests(done.returncode == 0, "\n".join(lines[-_SHOWN_LINES:]))
