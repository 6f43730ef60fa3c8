"""A mailbox without sockets: the engine loop's commands come from a callback, its reports go to another.

Must not know: the scheduler, the worker, what is measured.
"""

from collections.abc import Callable
from pathlib import Path
from typing import cast

from engine_service.build_engine import build_engine
from engine_service.engine_config import EngineConfig
from engine_service.loop.engine_loop import EngineLoop
from engine_service.loop.mailbox import EngineMailbox
from engine_service.loop.messages import Command, EngineReady, StepReport


class MemoryMailbox:
    """`next_commands(is_idle)` is asked once a step; when idle it must return something, at last Shutdown."""

    def __init__(self, next_commands: Callable[[bool], list[Command]], on_report: Callable[[StepReport], None]) -> None:
        self._next_commands = next_commands
        self._on_report = on_report

    def take(self, *, wait: bool, timeout_s: float | None = None) -> list[object]:
        return list(self._next_commands(wait))

    def wake(self) -> None:
        """Nobody sleeps here: an idle loop asks for commands again."""

    def publish(self, report: StepReport) -> None:
        self._on_report(report)


def build_in_process(config: EngineConfig, folder: Path, mailbox: MemoryMailbox) -> tuple[EngineLoop, EngineReady]:
    """The engine as the service builds it, with this mailbox in place of the pipe to the front process."""
    # The loop needs these methods only; the socket's class is what build_engine happens to name.
    return build_engine(config, folder, cast(EngineMailbox, mailbox))
