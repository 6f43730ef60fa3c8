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
_TOO_COMPLEX = "the grammar is too complex: checking it was stopped after {cpu} s of CPU time or {wall:g} s"


class CheckerGone(Exception):
    """The checker cannot be started."""


class CheckerProcess:
    """One checker, started when first asked and after each time it had to be ended. Used by one thread."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: tuple[int, ...], limits: GrammarLimits) -> None:
        self._settings = (str(folder), vocab_size, eos_token_ids, limits)
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def check(self, constraint: StructuredOutput) -> tuple[bool, str]:
        """(True, grammar in the library's own format), or (False, why not). Waits. Raises CheckerGone."""
        connection = self._connection or self._start()
        try:
            connection.send(constraint)
            if connection.poll(self._limits.check_wall_s):
                verdict, text = connection.recv()
                return verdict == "ok", text
        except (EOFError, OSError):
            pass  # it was ended by its limits, or crashed
        self.close()
        return False, _TOO_COMPLEX.format(cpu=self._limits.check_cpu_s, wall=self._limits.check_wall_s)

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
