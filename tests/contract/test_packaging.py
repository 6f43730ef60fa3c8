"""What is installed is what is in the repository: every package is listed, with the files that it reads."""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_package_is_installed() -> None:
    """One that is missing here works in a checkout and fails in an image."""
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    found = set()
    for name, folder in setup["package-dir"].items():
        for init in (ROOT / folder).rglob("__init__.py"):
            found.add(".".join([name, *init.parent.relative_to(ROOT / folder).parts]))
    assert found == set(setup["packages"])


def test_every_file_beside_the_code_is_installed() -> None:
    setup = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setup["package-data"]["*"]
    only_sources = {".proto", ".py", ".pyc"}
    for folder in setup["package-dir"].values():
        for file in (ROOT / folder).rglob("*"):
            if file.is_file() and file.suffix not in only_sources:
                assert any(file.match(pattern) for pattern in patterns), file
