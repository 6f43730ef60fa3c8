"""The subcommands that `tokenwire load` has of itself.

Must not know: how tests are done.
"""

from pathlib import Path
from typing import Annotated

import typer

from tokenwire_client.cli_output import show_table, terminal_text
from tokenwire_client.load.compare import compare as compared
from tokenwire_client.load.compare import differences
from tokenwire_client.load.console import COMPARE_HEADS, compare_row
from tokenwire_client.load.results import Report, read_json
from tokenwire_client.load.run_command import run, sweep_rates

JsonFile = Annotated[Path, typer.Argument(help="A JSON file that `run` or `sweep` wrote.")]


def add_commands(group: typer.Typer) -> None:
    group.command("run")(run)
    group.command("sweep")(sweep_rates)
    group.command("compare")(compare)
    group.command("report")(report)


def compare(a: JsonFile, b: JsonFile) -> None:
    """Figures of two reports and their ratios; with several rounds in both also how sure the ratios are."""
    first, second = _read(a), _read(b)
    try:
        rows = compared(first, second)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    show_table(COMPARE_HEADS, [compare_row(row) for row in rows])
    for line in differences(first, second):
        typer.echo(terminal_text(f"not the same: {line}"), err=True)


def report(
    source: JsonFile,
    html_file: Annotated[Path | None, typer.Option(help="Where the page goes. Unset: beside the JSON file.")] = None,
) -> None:
    """Makes the page of a JSON file again."""
    from tokenwire_client.load.page import write_page

    page = html_file or source.with_suffix(".html")
    try:
        write_page(_read(source), page)
    except ValueError as error:  # a distribution in it cannot be decoded
        raise typer.BadParameter(f"{source}: {error}") from error
    except OSError as error:
        raise typer.BadParameter(f"cannot write {page}: {error.strerror}") from None
    typer.echo(str(page))


def _read(path: Path) -> Report:
    try:
        return read_json(path)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
