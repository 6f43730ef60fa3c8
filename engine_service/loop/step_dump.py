"""Writes what the step recorder holds into a folder when the engine fails or hangs.

Must not know: what makes an engine fail, gRPC, torch.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from engine_service.loop.step_recorder import StepRecorder, packed
from engine_service.loop.trace_events import Recording, trace_parts

# Blocked in the engine process from its start, so that it is no harm where nobody waits for it.
STEP_DUMP_SIGNAL = signal.SIGUSR2
MAX_FILES = 20


def block_step_dump_signal() -> None:
    """Call before any thread is started: threads and processes inherit it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {STEP_DUMP_SIGNAL})


@dataclass(frozen=True, slots=True)
class StepDump:
    """`clock` is the loop's; `report` is told the new file or why there is none. Of the files in `folder` that were
    written here the newest MAX_FILES are kept."""

    recorder: StepRecorder
    folder: Path
    clock: Callable[[], float]
    report: Callable[[Path | OSError], None]

    def write(self) -> None:
        try:
            self.report(self._write())
        except OSError as error:
            self.report(error)

    def _write(self) -> Path:
        steps = [packed(step) for step in self.recorder.snapshot()]
        recording = Recording(steps, dict(self.recorder.live_names()), self.clock(), time.time())
        path = self.folder / f"steps-{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}-{os.getpid()}.json"
        unfinished = path.with_suffix(".part")
        try:
            with unfinished.open("x", encoding="utf-8") as file:
                file.writelines(trace_parts(recording))
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
        self._drop_old()
        return path

    def write_on_signal(self) -> None:
        """From now on a thread waits for STEP_DUMP_SIGNAL: it can write while the loop's own thread hangs."""

        def wait() -> None:
            while True:
                signal.sigwait({STEP_DUMP_SIGNAL})
                self.write()

        threading.Thread(target=wait, name="step-dump", daemon=True).start()

    def _drop_old(self) -> None:
        for old in sorted(self.folder.glob("steps-*Z-*.json"))[:-MAX_FILES]:
            with contextlib.suppress(OSError):
                old.unlink()
