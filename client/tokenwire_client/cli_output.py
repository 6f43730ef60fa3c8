"""What the `tokenwire` command prints: streamed text, tables, JSON, statistics, errors.

Must not know: flags, how a request is made.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from tokenwire_client.errors import InvalidRequest, TokenwireError
from tokenwire_client.sync_stream import Stream
from tokenwire_client.types import Completion, Model

EXIT_FAILED = 1
EXIT_INVALID = 2
EXIT_INTERRUPTED = 130

# A model's text must not steer the terminal: control characters become their pictures.
_PICTURES = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_PICTURES |= {0x7F: 0x2421} | dict.fromkeys(range(0x80, 0xA0), 0xFFFD)


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds from the request; `first_token_s` is None when there was none."""

    first_token_s: float | None
    total_s: float


def on_terminal() -> bool:
    """Whether a person reads standard output."""
    return sys.stdout.isatty()


def terminal_text(text: str) -> str:
    """The text as it may go to a terminal."""
    return text.translate(_PICTURES)


def as_json(value: object) -> str:
    """One line; dataclasses as objects, enums as their values."""
    return json.dumps(value, ensure_ascii=False, default=_plain)


def show_answer(
    stream: Stream, *, json_output: bool, stats: bool, clock: Callable[[], float] = time.perf_counter
) -> Completion:
    """Prints a generation while it arrives (as JSON: at its end) and returns it."""
    began = clock()
    first: float | None = None
    write = _no_text if json_output else _writer()
    try:
        with stream, _waiting(not json_output and on_terminal()) as stop_waiting:
            for delta in stream:
                if first is None:
                    first = clock() - began
                stop_waiting()
                write(delta.text)
    finally:
        # Also before the message about a failure.
        write("\n")
    completion = stream.result()
    timing = Timing(first, clock() - began)
    if json_output:
        print(as_json({**asdict(completion), "timing": asdict(timing)}), flush=True)
    else:
        show_logprobs(completion)
    if stats:
        print(stats_line(completion, timing), file=sys.stderr)
    return completion


def show_answers(
    stream: Stream, count: int, *, json_output: bool, stats: bool, clock: Callable[[], float] = time.perf_counter
) -> None:
    """One generation as it arrives; several when all have ended, each after a line with its number."""
    if count <= 1:
        show_answer(stream, json_output=json_output, stats=stats)
        return
    began = clock()
    first: float | None = None
    with stream, _waiting(not json_output and on_terminal()):
        for _ in stream:
            if first is None:
                first = clock() - began
        completions = stream.results()
    timing = Timing(first, clock() - began)
    if json_output:
        answers = [asdict(completion) for completion in completions]
        print(as_json({"completions": answers, "timing": asdict(timing)}), flush=True)
    for completion in completions:
        if not json_output:
            print(f"--- {completion.index + 1} of {count}")
            print(terminal_text(completion.text) if on_terminal() else completion.text, flush=True)
            show_logprobs(completion)
        if stats:
            print(stats_line(completion, timing), file=sys.stderr)


def show_logprobs(completion: Completion) -> None:
    """A line for each token on standard error, where they were asked for: log probability, rank, token, others."""
    for position in completion.logprobs:
        assert position.token is not None
        others = " ".join(f"{each.text!r}={each.logprob:.4f}" for each in position.top)
        line = f"{position.token.logprob:9.4f} {position.rank:6} {position.token.text!r} {others}"
        print(terminal_text(line).rstrip(), file=sys.stderr)


def stats_line(completion: Completion, timing: Timing) -> str:
    """Counts and times as `key=value`, for eyes and for grep."""
    usage = completion.usage
    values = {
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "first_token_s": "none" if timing.first_token_s is None else f"{timing.first_token_s:.3f}",
        "total_s": f"{timing.total_s:.3f}",
        "finish_reason": completion.finish_reason.value,
        "seed": completion.seed,
    }
    return " ".join(f"{key}={value}" for key, value in values.items())


def show_models(models: tuple[Model, ...]) -> None:
    """A table on a terminal, tab-separated lines otherwise."""
    heads = ("name", "max_model_len", "vocab_size", "connected_engines")
    rows = [(each.name, str(each.max_model_len), str(each.vocab_size), str(each.connected_engines)) for each in models]
    show_table(heads, rows)


def show_table(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
    """A table on a terminal, tab-separated lines otherwise."""
    if not on_terminal():
        for row in (heads, *rows):
            print("\t".join(row))
        return
    table = Table(*heads)
    for row in rows:
        table.add_row(*map(terminal_text, row))
    Console().print(table)


def report(error: TokenwireError) -> int:
    """Says on standard error what went wrong; gives the exit code."""
    code = error.code.value.replace("_", " ")
    print(terminal_text(f"tokenwire: {code}: {error.message}"), file=sys.stderr)
    for violation in error.field_violations:
        if violation.field not in error.message:
            print(terminal_text(f"  {violation.field}: {violation.description}"), file=sys.stderr)
    if error.retry_after is not None:
        print(f"  try again in {error.retry_after:g} s", file=sys.stderr)
    return EXIT_INVALID if isinstance(error, InvalidRequest) else EXIT_FAILED


@contextmanager
def exit_codes() -> Iterator[None]:
    """Turns failures inside into messages and exit codes, never into tracebacks."""
    try:
        yield
    except TokenwireError as error:
        raise typer.Exit(report(error)) from None
    except KeyboardInterrupt:
        print(file=sys.stderr)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:
        # The reader has left; nothing may be flushed into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FAILED) from None


@contextmanager
def _waiting(shown: bool) -> Iterator[Callable[[], None]]:
    """A spinner until the first text; gives the function that ends it."""
    if not shown:
        yield lambda: None
        return
    with Console().status("") as status:
        yield status.stop


def _no_text(_: str) -> None:
    """Where JSON follows."""


def _writer() -> Callable[[str], None]:
    """Writes text as it is, at once."""
    if on_terminal():
        console = Console()
        return lambda text: console.out(terminal_text(text), end="", highlight=False)

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    return write


def _plain(value: Any) -> object:
    """What JSON has no type for. A token's bytes are shown as text, its id tells what that cannot."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value.value if isinstance(value, Enum) else asdict(value)
