"""The documents say what the code does: configuration, flags, modules (tests/documents runs their commands)."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import typer

from docs.generate_configuration import TARGET, render
from engine_service.config import EngineSettings
from tokenizer_service.config import TokenizerSettings
from tokenwire_client.cli_app import app
from tokenwire_client.load.commands import add_commands

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_configuration_page_is_fresh() -> None:
    assert TARGET.read_text() == render(), "run `python docs/generate_configuration.py`"


def load_commands() -> dict[str, Any]:
    """The subcommands of `tokenwire load` that are the client's own."""
    group = typer.Typer()
    add_commands(group)
    return dict(typer.main.get_command(group).commands)  # type: ignore[attr-defined]


def test_every_load_test_the_documents_show_is_one() -> None:
    page = (ROOT / "docs" / "load-testing.md").read_text().replace("\\\n", " ")
    lines = re.findall(r"^tokenwire load (\S+)(.*)$", page, flags=re.MULTILINE)
    assert len(lines) > 8
    for name, rest in lines:
        arguments = shlex.split(rest, comments=True)
        load_commands()[name].make_context(name, arguments)


def test_every_flag_the_documents_name_exists() -> None:
    known = {"--config", "--help"}
    for settings in (EngineSettings, TokenizerSettings):
        known |= {"--" + name.replace("_", "-") for name in settings.model_fields}
    own = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    commands = [*load_commands().values(), *own.values()]
    known |= {flag for command in commands for each in command.params for flag in each.opts}
    for document in DOCUMENTS:
        named = set(re.findall(r"`(--[a-z0-9-]+)", document.read_text()))
        assert {flag.replace("--no-", "--") for flag in named} <= known, document.name


def test_every_module_the_life_of_a_request_names_exists() -> None:
    page = (ROOT / "docs" / "life-of-a-request.md").read_text()
    for module in re.findall(r"`((?:engine|tokenizer)_service/[a-z_/]+\.py)`", page):
        assert (ROOT / module).is_file(), module


def test_make_setup_takes_another_torch(tmp_path: Path) -> None:
    """As the README says: also in an environment that is ready, and nothing pins it back."""
    stamp = f"{tmp_path}/.ready-torch2.13.0"
    Path(stamp).touch()

    def commands(*variables: str) -> str:
        make = ["make", "--dry-run", "setup", f"VENV={tmp_path}", *variables]
        return subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert "pip install" not in commands("--assume-old=pyproject.toml", "TORCH=torch==2.13.0")
    assert '"torch==2.12.1"' in commands("TORCH=torch==2.12.1")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pinned = [requirement for group in extras.values() for requirement in group if requirement.startswith("torch==")]
    assert pinned == []
