"""Processes of targets: started in groups of their own, stopped and continued as groups, ended by their ids.

Must not know: what the processes serve.
"""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

POLL_S = 0.05
STOP_TIMEOUT_S = 15.0


class TargetFailed(Exception):
    """A target ended, or was not ready in time; the message says which and how its log ends."""


class GroupProcess:
    """A child in a process group of its own, its output in `log`. Owns the whole group."""

    def __init__(
        self, command: Sequence[str], environment: Mapping[str, str], log: Path, *, has_pipes: bool = False
    ) -> None:
        self.name = Path(command[0]).name
        self.log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        pipe = subprocess.PIPE if has_pipes else None
        with log.open("wb") as file:
            self.popen = subprocess.Popen(
                list(command),
                env=dict(environment),
                stdin=pipe or subprocess.DEVNULL,
                stdout=pipe or file,
                stderr=file,
                start_new_session=True,
            )

    def pause(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def assert_alive(self) -> None:
        """TargetFailed when the process has ended."""
        if self.popen.poll() is not None:
            raise TargetFailed(f"{self.name} ended with code {self.popen.returncode}:\n{self.log_end()}")

    def log_end(self, lines: int = 15) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def memory_bytes(self) -> int:
        """Resident bytes of the process and its children, shared pages counted in each."""
        return sum(process.memory_info().rss for process in self._living())

    def cpu_s(self) -> float:
        """CPU seconds that the process and its living children have used."""
        times = [process.cpu_times() for process in self._living()]
        return sum(time.user + time.system for time in times)

    def _living(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self.popen.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL for what is left of the group after a while."""
        self.resume()
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self.popen.wait, STOP_TIMEOUT_S)
        self._signal(signal.SIGKILL)
        self.popen.wait()
        for stream in (self.popen.stdin, self.popen.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()

    def _signal(self, number: signal.Signals) -> None:
        # The group may outlive its leader; its id is not given away before both are gone.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, number)


def free_port() -> int:
    """A loopback port that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
