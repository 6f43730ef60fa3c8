"""The files of a report: tried before a test, which would be lost with them, and written after it.

Must not know: flags, how figures are made or look.
"""

from dataclasses import dataclass
from pathlib import Path

import typer

from tokenwire_client.cli_output import EXIT_FAILED, terminal_text
from tokenwire_client.load.results import Report, write_json


@dataclass(frozen=True, slots=True)
class Output:
    """Where the report goes."""

    json: Path
    page: Path

    def check(self) -> None:
        """Makes the folders. BadParameter for a file that cannot be written."""
        for path in (self.json, self.page):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                was_there = path.exists()
                path.open("ab").close()
                if not was_there:
                    path.unlink()
            except OSError as error:
                raise typer.BadParameter(_cannot(path, error)) from None

    def write(self, report: Report) -> None:
        """Both files; ends the command where a disk has become full meanwhile."""
        from tokenwire_client.load.page import write_page  # plots take half a second to import

        try:
            write_json(report, self.json)
            write_page(report, self.page)
        except OSError as error:
            typer.echo(terminal_text(f"tokenwire: {_cannot(self.json, error)}"), err=True)
            raise typer.Exit(EXIT_FAILED) from None
        typer.echo(terminal_text(f"report: {self.page} ({self.json})"), err=True)


def _cannot(path: Path, error: OSError) -> str:
    return f"cannot write {error.filename or path}: {error.strerror}"
