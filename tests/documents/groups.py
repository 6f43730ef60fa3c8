"""The slow groups that a mark in a document may name: why each is slow, and what it needs.

Must not know: which blocks belong to them.
"""

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks that the default suite has no time or no means for. `needs` says what is missing here, "" for nothing."""

    why: str
    needs: Callable[[], str] = lambda: ""
    marks: tuple[pytest.MarkDecorator, ...] = ()


def _program(name: str) -> Callable[[], str]:
    return lambda: "" if shutil.which(name) else f"the program {name}"


def _compose() -> str:
    """Debian's Docker has none of its own; docs/compose.md says what is run there."""
    asked = ("docker", "compose", "version")
    has_it = shutil.which(asked[0]) and subprocess.run(asked, capture_output=True, check=False).returncode == 0
    return "" if has_it else "Docker with Compose v2 (`docker compose`)"


def _peers() -> str:
    return "" if os.environ.get("PEERS") else "the variable PEERS: a folder made as benchmarks/README.md says"


GROUPS = {
    "load": Group("sends load for longer than a second"),
    "long": Group("measures this machine for minutes"),
    "gateway": Group("installs the public gateway from PyPI"),
    "compose": Group("builds and starts containers", _compose),
    "kubernetes": Group("needs a cluster", _program("kubectl")),
    "gpu": Group("needs a CUDA device", marks=(pytest.mark.gpu,)),
    "peers": Group("measures against other servers for an hour", _peers),
    "walkthrough": Group("the walk from nothing to a dashboard, as written"),
}
