"""Subcommands of `tokenwire load` that other packages bring: found by their metadata, named when they cannot run."""

from pathlib import Path

import pytest
import typer

from tokenwire_client.cli_plugins import add_plugins


def install(folder: Path, name: str, entry: str) -> None:
    """A distribution as `pip` leaves it, without code."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[tokenwire.load]\n{entry}\n")


def test_a_plugin_that_cannot_run_names_what_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, "acme-replay", "replay = no_such_package.replay:run [fast]")
    install(tmp_path, "acme-plain", "plain = no_such_package.plain:run")
    install(tmp_path, "acme-good", "version = platform:python_version")
    monkeypatch.syspath_prepend(tmp_path)
    group = typer.Typer()
    add_plugins(group)
    said = capsys.readouterr().err
    assert "tokenwire: `load plain` needs no_such_package: pip install 'no_such_package'\n" in said
    assert "tokenwire: `load replay` needs no_such_package: pip install 'acme-replay[fast]'\n" in said
    assert "version" in {command.name for command in group.registered_commands}
