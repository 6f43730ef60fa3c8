"""The conversation of `tokenwire chat` on a terminal.

Must not know: flags, connections.
"""

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TypeAlias

from rich.console import Console

from tokenwire_client.cli_output import report, show_answer
from tokenwire_client.errors import TokenwireError
from tokenwire_client.sync_stream import Stream
from tokenwire_client.types import Message

Start: TypeAlias = Callable[[Sequence[Message]], Stream]


def converse(start: Start, system: Sequence[Message], stats: bool) -> None:
    """Reads turns and streams answers until the end of input (Ctrl-D).

    Ctrl-C during an answer ends that answer only; at the prompt it raises KeyboardInterrupt. A turn that
    failed or was stopped is forgotten.
    """
    with contextlib.suppress(ImportError):
        # Line editing and history, where the platform has them.
        import readline  # noqa: F401
    Console().print("Ctrl-D ends the conversation, Ctrl-C an answer.", style="dim")
    history = list(system)
    while (line := _read_line()) is not None:
        if not line.strip():
            continue
        turn = Message("user", line)
        answer = _answer(start, [*history, turn], stats)
        if answer is not None:
            history += [turn, Message("assistant", answer)]


def _read_line() -> str | None:
    """The next line, None at the end of input."""
    try:
        # The prompt is given to readline, which must know its width.
        return input("you> ")
    except EOFError:
        print()
        return None


def _answer(start: Callable[[Sequence[Message]], Stream], messages: Sequence[Message], stats: bool) -> str | None:
    """The text of an answer that came to its end."""
    try:
        return show_answer(start(messages), json_output=False, stats=stats).text
    except KeyboardInterrupt:
        print("\n(stopped)", file=sys.stderr)
    except TokenwireError as error:
        report(error)
    return None
