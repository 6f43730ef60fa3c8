"""Shows how a round goes: a bar on a terminal, a line every few seconds elsewhere. All on standard error.

Must not know: what is measured beyond the recorder's counts.
"""

import asyncio
import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tokenwire_client.load.recorder import Recorder

_BAR_EVERY_S = 0.2
_LINE_EVERY_S = 5.0


def counts_line(recorder: Recorder) -> str:
    total = recorder.total
    failed = sum(total.errors.values())
    parts = [f"{recorder.in_flight} in flight", f"{total.ok} ok"]
    parts += [f"{failed} failed"] if failed else []
    parts += [f"{total.not_sent} not sent"] if total.not_sent else []
    parts += [f"TTFT p50 {total.ttft.percentile(50) * 1e3:.0f} ms"] if total.ttft.count else []
    return ", ".join(parts)


class Lines:
    """For logs."""

    def __init__(self, write: Callable[[str], None], every_s: float = _LINE_EVERY_S) -> None:
        self._write = write
        self._every_s = every_s

    async def watch(self, title: str, recorder: Recorder, seconds: float | None, requests: int | None) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(self._every_s)
            self._write(f"{title}: {time.monotonic() - began:.0f} s, {counts_line(recorder)}")


class Bar:
    """For people."""

    def __init__(self, console: Console) -> None:
        self._console = console

    async def watch(self, title: str, recorder: Recorder, seconds: float | None, requests: int | None) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"))
        began = time.monotonic()
        with Progress(*columns, console=self._console, auto_refresh=False) as progress:
            task = progress.add_task(title, total=seconds or requests, now="")
            while True:
                total = recorder.total
                done = time.monotonic() - began if seconds else total.sent + total.not_sent
                progress.update(task, completed=done, now=counts_line(recorder), refresh=True)
                await asyncio.sleep(_BAR_EVERY_S)


def progress_for_stderr() -> Lines | Bar:
    if sys.stderr.isatty():
        return Bar(Console(stderr=True))
    return Lines(lambda line: print(line, file=sys.stderr, flush=True))
