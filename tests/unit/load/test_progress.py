"""What is shown while a round runs: lines for logs, a bar for terminals."""

import asyncio
import contextlib
import io

from rich.console import Console

from tests.fixtures.virtual_time import run_virtually
from tokenwire_client.load.progress import Bar, Lines
from tokenwire_client.load.recorder import Recorder, Targets
from tokenwire_client.load.workload import LoadRequest


async def watched(watcher: Lines | Bar, seconds: float) -> None:
    """Shows a run of which three requests began and one could not, for so long."""
    recorder = Recorder(0.0, 0.0, Targets(), [""], 1)
    for number in range(3):
        recorder.started(LoadRequest(number, "x", 1, 1), 0.0, 0.0)
    recorder.not_sent(LoadRequest(3, "x", 1, 1), 0.0)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await watcher.watch("4 requests/s", recorder, 60.0, None)


def test_logs_get_a_line_now_and_then() -> None:
    lines: list[str] = []
    run_virtually(watched(Lines(lines.append, every_s=5.0), 12.0))
    assert len(lines) == 2
    assert lines[0].startswith("4 requests/s: ")
    assert lines[0].endswith("3 in flight, 0 ok, 1 not sent")


def test_a_terminal_gets_a_bar() -> None:
    file = io.StringIO()
    run_virtually(watched(Bar(Console(file=file, force_terminal=True, width=120)), 1.0))
    assert "4 requests/s" in file.getvalue()
    assert "3 in flight, 0 ok, 1 not sent" in file.getvalue()
