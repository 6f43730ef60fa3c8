"""`tokenwire load ...`: subcommands that other installed packages bring (entry points of the group `tokenwire.load`).

Must not know: what the subcommands do.
"""

from importlib.metadata import entry_points

import typer

GROUP = "load"


def add_plugins(group: typer.Typer) -> None:
    """Adds every subcommand that can be imported here; one whose packages are missing is left out, and said so."""
    for entry in sorted(entry_points(group=f"tokenwire.{GROUP}"), key=lambda entry: entry.name):
        try:
            group.command(entry.name)(entry.load())
        except ModuleNotFoundError as missing:
            package = str(missing.name).partition(".")[0]
            typer.echo(f"tokenwire: `{GROUP} {entry.name}` needs {package}: pip install 'tokenwire[engine]'", err=True)
