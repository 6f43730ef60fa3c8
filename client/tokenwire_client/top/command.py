"""The command `tokenwire top`: asks a tokenizer service again and again and shows what it says.

Must not know: gRPC, how a frame looks.
"""

import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from tokenwire_client import cli_options as flags
from tokenwire_client.cli_engines import OperatorTarget
from tokenwire_client.cli_output import as_json, exit_codes, on_terminal
from tokenwire_client.errors import ErrorCode, TokenwireError
from tokenwire_client.operator import DEFAULT_TIMEOUT_S, Operator
from tokenwire_client.top.keys import single_keys
from tokenwire_client.top.rates import Frame, History, Reading
from tokenwire_client.top.view import render

# What a service says that may be there again in a moment.
_AWAY = frozenset({ErrorCode.UNAVAILABLE, ErrorCode.DEADLINE_EXCEEDED})
_LINES_BESIDE_REQUESTS = 9
_FULL_WIDTH = 160
_QUIT_KEYS = frozenset({"q", "Q", "\x1b"})

Interval = Annotated[float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between two looks.")]
Once = Annotated[bool, typer.Option("--once", help="One frame, of two looks an interval apart; then end.")]
MaxRequests = Annotated[int, typer.Option("--requests", min=0, max=1000, help="So many requests, the oldest.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds that one look may take.")]


def top(
    operator: OperatorTarget,
    interval: Interval = 1.0,
    once: Once = False,
    json_output: flags.AsJson = False,
    requests: MaxRequests = 30,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    tls: flags.UseTls = False,
    ca_file: flags.CaFile = None,
    cert_file: flags.CertFile = None,
    key_file: flags.KeyFile = None,
    server_name: flags.ServerName = None,
) -> None:
    """Shows engines and requests of a tokenizer service live; q ends it. With --json a line for each frame."""
    security = flags.tls(tls, ca_file, cert_file, key_file, server_name)
    with exit_codes(), Operator(operator, timeout=timeout, tls=security) as service:
        watch = Watch(service, History(operator), requests, time.monotonic)
        if once:
            frame = watch.pair(lambda: time.sleep(interval))
            print(frame_json(frame)) if json_output else _console().print(render(frame, requests))
        elif json_output:
            while True:
                print(frame_json(watch.look()), flush=True)
                time.sleep(interval)
        else:
            _live(watch, interval, requests)


@dataclass(slots=True)
class Watch:
    """Looks at one service; `clock` in seconds."""

    operator: Operator
    history: History
    max_requests: int
    clock: Callable[[], float]

    def look(self) -> Frame:
        """What is so now; a service that is away is a frame too. Raises TokenwireError for what will not pass."""
        try:
            return self.history.add(self._read())
        except TokenwireError as error:
            if error.code not in _AWAY:
                raise
            return self.history.away(error.message, self.clock())

    def pair(self, pause: Callable[[], None]) -> Frame:
        """The second of two looks. Raises TokenwireError, also for a service that is away."""
        self.history.add(self._read())
        pause()
        return self.history.add(self._read())

    def _read(self) -> Reading:
        status = self.operator.status(self.max_requests)
        return Reading(self.clock(), status)


def frame_json(frame: Frame) -> str:
    """One line."""
    rates = {address: asdict(each) for address, each in frame.rates.items()}
    return as_json(
        {
            "target": frame.target,
            "problem": frame.problem,
            "status_age": frame.age,
            "generated_tokens_per_second": frame.generated_tokens_per_second,
            "prompt_tokens_per_second": frame.prompt_tokens_per_second,
            "rates": rates,
            "status": None if frame.status is None else asdict(frame.status),
        }
    )


def _live(watch: Watch, interval: float, most: int) -> None:
    console = _console()
    with single_keys() as keys, Live(console=console, screen=console.is_terminal, auto_refresh=False) as live:
        while True:
            began = time.monotonic()
            frame = watch.look()
            engines = 0 if frame.status is None else len(frame.status.engines)
            live.update(render(frame, min(most, _room(console, engines))), refresh=True)
            if keys.wait(interval - (time.monotonic() - began)) in _QUIT_KEYS:
                return


def _room(console: Console, engines: int) -> int:
    """Lines that requests may take."""
    return max(1, console.height - _LINES_BESIDE_REQUESTS - engines)


def _console() -> Console:
    """A file or a pipe is as wide as the view."""
    is_wide = not on_terminal() and "COLUMNS" not in os.environ
    return Console(highlight=False, width=_FULL_WIDTH if is_wide else None)
