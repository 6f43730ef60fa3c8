"""Starts the engine beside the front: as a process of its own, or as a thread for tests and debugging.

Must not know: what the engine is built from, torch, gRPC.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from engine_service.loop.mailbox import EngineMailbox, FrontGone, socket_pair
from engine_service.loop.step_dump import STEP_DUMP_SIGNAL

# Only a process that has registered for it may be sent this: by default it kills.
STACK_DUMP_SIGNAL = signal.SIGUSR1


class RunningEngine(Protocol):
    """A started engine, whatever it runs in."""

    @property
    def pid(self) -> int: ...

    async def wait(self) -> int:
        """Its exit status, once it has ended."""

    def dump_stacks(self) -> None:
        """Makes it write what each of its threads is doing to its log, if that is possible."""

    def dump_steps(self) -> None:
        """Makes it write its recorded steps to the folder for that, if it has one."""

    def kill(self) -> None:
        """Ends it at once, if that is possible; fine when it has ended already."""


@dataclass(frozen=True, slots=True)
class Launched:
    """`front_end` is the front's end of the mailbox; who gets it owns it."""

    engine: RunningEngine
    front_end: socket.socket


class _ProcessEngine:
    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    def dump_stacks(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(STACK_DUMP_SIGNAL)

    def dump_steps(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(STEP_DUMP_SIGNAL)

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)


async def launch_process(module: str, environment: Mapping[str, str]) -> Launched:
    """Runs `python -m module N`, N being the descriptor of its end of a new mailbox, in that environment.

    A fresh interpreter: nothing of the front (gRPC, its threads) is inherited but that descriptor.
    """
    front_end, engine_end = socket_pair()
    with engine_end:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(engine_end.fileno()),
            stdin=asyncio.subprocess.DEVNULL,
            env=dict(environment),
            pass_fds=(engine_end.fileno(),),
        )
    return Launched(_ProcessEngine(process), front_end)


def engine_environment(environment: Mapping[str, str], threads: int) -> dict[str, str]:
    """The engine process's environment: what OpenMP reads before torch can be told.

    Waiting threads sleep: spinning ones cost 3-8 times the speed as soon as anything else is busy.
    """
    result = dict(environment)
    result.setdefault("OMP_WAIT_POLICY", "passive")
    if threads > 0:
        result["OMP_NUM_THREADS"] = str(threads)
    return result


class _ThreadEngine:
    """Cannot be killed: it ends by Shutdown or by the front's end closing."""

    def __init__(self, target: Callable[[EngineMailbox], None], mailbox: EngineMailbox) -> None:
        self._target = target
        self._mailbox = mailbox
        self._status = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def pid(self) -> int:
        return os.getpid()

    async def wait(self) -> int:
        await asyncio.to_thread(self._thread.join)
        return self._status

    def dump_stacks(self) -> None:
        return

    def dump_steps(self) -> None:
        return

    def kill(self) -> None:
        return

    def _run(self) -> None:
        try:
            self._target(self._mailbox)
        except FrontGone:
            pass
        except Exception:
            self._status = 1
            raise
        finally:
            self._mailbox.close()


def launch_thread(target: Callable[[EngineMailbox], None]) -> Launched:
    """Runs `target` with the engine's end of a new mailbox in a thread of this process."""
    front_end, engine_end = socket_pair()
    return Launched(_ThreadEngine(target, EngineMailbox(engine_end)), front_end)
