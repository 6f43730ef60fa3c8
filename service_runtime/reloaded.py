"""What is made of files, made again when they change.

Must not know: what the files hold.
"""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import structlog

Made = TypeVar("Made")
_log = structlog.get_logger()


class Reloaded(Generic[Made]):
    """What `load` makes of `files`, made again when one of them has changed. For any thread.

    A bad change is logged once, and what was there before stays in use.
    """

    def __init__(
        self, name: str, files: Sequence[Path], load: Callable[[], Made], bad: type[Exception] = ValueError
    ) -> None:
        """`name` is that of the log events. Raises `bad` as `load` does."""
        self._name = name
        self._bad = bad
        self._files = files
        self._load = load
        self._lock = threading.Lock()
        # Taken first: a change while we load is seen by the next call.
        self._stamp = _stamp(files)
        self._made = load()

    def current(self) -> Made:
        """The same object as long as nothing has changed; costs a `stat` of each file."""
        with self._lock:
            stamp = _stamp(self._files)
            if stamp != self._stamp:
                self._stamp = stamp
                self._reload()
            return self._made

    def _reload(self) -> None:
        try:
            self._made = self._load()
        except self._bad as error:
            _log.error(f"{self._name}_reload_failed", reason=str(error), kept="what was there before")
        else:
            _log.info(f"{self._name}_reloaded", files=[str(path) for path in self._files])


def _stamp(files: Sequence[Path]) -> tuple[tuple[int, int, int] | None, ...]:
    """Changes with every replacement, also by a link that points elsewhere (as secrets are mounted)."""

    def one(path: Path) -> tuple[int, int, int] | None:
        try:
            status = path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_size, status.st_mtime_ns

    return tuple(one(path) for path in files)
