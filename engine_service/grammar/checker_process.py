"""The engine's end of the checker: starts it, asks it, and ends it when it takes too long.

Must not know: the grammar library, requests.
"""

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from engine_service.core.sampling import StructuredOutput
from engine_service.grammar.limits import GrammarLimits

_MODULE = "engine_service.grammar.checker"
_START_S = 60.0
_GRACE_S = 5.0  # until a check that its own limits should have ended is ended from here


class CheckerGone(Exception):
    """The checker cannot be started."""


class CheckerProcess:
    """One checker, started when first asked and should it ever be lost. Used by one thread."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], limits: GrammarLimits) -> None:
        self._settings = (str(folder), vocab_size, eos_token_ids, limits)
        self._limits = limits
        self._number = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def check(self, constraint: StructuredOutput, cpu_s: float) -> tuple[bool, str] | None:
        """(True, grammar in the library's own format), or (False, why not); None if it took too long or crashed.

        Waits. Raises CheckerGone.
        """
        connection = self._connection or self._start()
        try:
            while connection.poll(0):
                connection.recv()  # a child that died of nothing that we asked
            self._number += 1
            connection.send((self._number, constraint, cpu_s))
            while connection.poll(self._limits.check_wall_s + _GRACE_S):
                number, verdict, text = connection.recv()
                if number is None:
                    return None
                if number == self._number:
                    return verdict == "ok", text
        except (EOFError, OSError):
            pass  # all of it crashed
        self.close()
        return None

    def kill(self) -> None:
        """Ends it from another thread, for good: a check that waits for it ends too."""
        if self._process is not None:
            self._process.kill()

    def close(self) -> None:
        """Ends it; the next check starts another."""
        if self._connection is not None:
            self._connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._connection = self._process = None

    def _start(self) -> Connection:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 (our own module)
                [sys.executable, "-m", _MODULE, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                env=_environment(),
            )
        self._connection = Connection(ours.detach())
        try:
            self._connection.send(self._settings)
            if self._connection.poll(_START_S) and self._connection.recv() == "ready":
                return self._connection
        except (EOFError, OSError):
            pass
        self.close()
        raise CheckerGone("the grammar checker did not start")


def _environment() -> dict[str, str]:
    """One thread is enough."""
    return {**os.environ, "RAYON_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
