"""`tokenwire load ...`: our own subcommands, and those that other installed packages bring (entry points of the group
`tokenwire.load`).

Must not know: what the subcommands do.
"""

from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

import typer

GROUP = "load"
OWN_PACKAGES = ("aiohttp", "hdrh", "matplotlib")


def add_own(group: typer.Typer) -> None:
    """Adds the subcommands of this package; where the packages of the extra `load` are missing, it says so."""
    missing = [package for package in OWN_PACKAGES if find_spec(package) is None]
    if missing:
        typer.echo(f"tokenwire: load tests need {', '.join(missing)}: pip install 'tokenwire[load]'", err=True)
        return
    from tokenwire_client.load.commands import add_commands

    add_commands(group)


def add_plugins(group: typer.Typer) -> None:
    """Adds every subcommand that can be imported here; one whose packages are missing is left out, and said so."""
    for entry in sorted(entry_points(group=f"tokenwire.{GROUP}"), key=lambda entry: entry.name):
        try:
            group.command(entry.name)(entry.load())
        except ModuleNotFoundError as missing:
            package = str(missing.name).partition(".")[0]
            needed = _requirement(entry, package)
            typer.echo(f"tokenwire: `{GROUP} {entry.name}` needs {package}: pip install '{needed}'", err=True)


def _requirement(entry: EntryPoint, package: str) -> str:
    """What brings it: the extra of its distribution that the entry point names, else the missing package itself."""
    if entry.dist is None or not entry.extras:
        return package
    return f"{entry.dist.name}[{','.join(entry.extras)}]"
