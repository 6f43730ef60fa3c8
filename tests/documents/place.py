"""Where the blocks of one page run, one after the other: a copy of the tree, a shell whose variables last, one Python.

Must not know: which blocks there are, what they are for.
"""

import fnmatch
import os
import random
import re
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.local import stop
from tests.documents.blocks import ROOT, SHELLS, Block
from tests.documents.substitutions import DRY_TARGETS, FILES, PORTS, shortened, with_ports

# Settings of the services by the default port that they move.
_PORT_VARIABLES = {
    50050: "TOKENWIRE_TOKENIZER_PORT",
    50051: "TOKENWIRE_ENGINE_PORT",
    8000: "TOKENWIRE_TOKENIZER_HTTP_PORT",
    9090: "TOKENWIRE_TOKENIZER_METRICS_PORT",
    9091: "TOKENWIRE_ENGINE_METRICS_PORT",
}
# Below those of outgoing connections, which Linux begins at 32,768.
_LASTING_PORTS = range(20_000, 32_000)


def free_ports() -> dict[int, int]:
    """A free port for each that documents name."""
    with ExitStack() as held:
        return {port: held.enter_context(_bound()).getsockname()[1] for port in PORTS}


def _bound() -> socket.socket:
    """On a port that the system gives to no connection: a service asks for it only some seconds from now."""
    while True:
        made = socket.socket()
        try:
            made.bind(("127.0.0.1", random.choice(_LASTING_PORTS)))
        except OSError:
            made.close()
        else:
            return made


@dataclass(slots=True)
class Place:
    """Runs blocks. `tree` is the copy; `ports` maps default ports to those of the services that run; `state` is a file
    that holds the shell's variables from block to block.
    """

    tree: Path
    ports: Mapping[int, int]
    most_s: int
    variables: dict[str, str]
    state: Path
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})

    def run(self, block: Block, timeout_s: float) -> str:
        """Its output. AssertionError with the place in the page, and what it said, if it fails."""
        code = shortened(with_ports(block.code, self.ports), self.most_s)
        if block.language in SHELLS:
            commands = _console(code) if block.language == "console" else [(code, None)]
            return "".join(self._shell(each, wanted, block.place, timeout_s) for each, wanted in commands)
        # As many empty lines before it as in the page, so that a traceback has the page's numbers.
        exec(compile("\n" * (block.line - 1) + code, block.page, "exec"), self.names)
        return ""

    def _shell(self, code: str, wanted: str | None, place: str, timeout_s: float) -> str:
        script = f"set -euo pipefail\nsource {self.state}\ntrap 'export -p > {self.state}' EXIT\n{code}"
        run = subprocess.run(
            ["bash", "-c", script],
            cwd=self.tree,
            env=os.environ | self.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert run.returncode == 0, f"{place}: exit code {run.returncode}\n{code}\n{run.stdout[-4000:]}"
        if wanted is not None:
            assert fnmatch.fnmatchcase(run.stdout.strip(), _pattern(wanted)), f"{place}: {run.stdout}"
        return run.stdout


def _console(code: str) -> Iterator[tuple[str, str | None]]:
    """Commands, and the output written below each; None where there is none."""
    for part in re.split(r"^\$ ", code, flags=re.MULTILINE)[1:]:
        command, _, output = part.partition("\n")
        while command.endswith("\\"):
            more, _, output = output.partition("\n")
            command += "\n" + more
        yield command, output.strip() or None


def _pattern(wanted: str) -> str:
    return re.sub(r"([*?\[])", r"[\1]", wanted).replace("...", "*")


@contextmanager
def place_in(
    tree: Path,
    scratch: Path,
    model: Path,
    ports: Mapping[int, int] | None,
    most_s: int,
    more_variables: Mapping[str, str],
) -> Iterator[Place]:
    """A place whose services are ended afterwards. `ports` None: blocks start the services, on free ports."""
    owned = ports is None
    ports = free_ports() if ports is None else ports
    pids, state = scratch / "pids", scratch / "variables"
    pids.touch()
    state.touch()
    _write_programs(scratch / "bin", scratch / "packages")
    if not (tree / "my-model").exists():
        (tree / "my-model").symlink_to(model)
    for name, content in FILES.items():
        (tree / name).write_text(content)
    variables = {
        # What runs is the copy, so that commands may write into it.
        "PYTHONPATH": os.pathsep.join(map(str, (tree, tree / "protos", tree / "client", scratch / "packages"))),
        "PATH": os.pathsep.join(
            map(str, (scratch / "bin", scratch / "packages" / "bin", Path(sys.executable).parent, os.environ["PATH"]))
        ),
        "DOCUMENTS_PIDS": str(pids),
        "DOCUMENTS_LOGS": str(scratch),
        "TOKENWIRE_TARGET": f"127.0.0.1:{ports[50050]}",
        "TOKENWIRE_TOKENIZER_ENGINE": f"127.0.0.1:{ports[50051]}",
        "TERM": "dumb",
        # Services beside those that run already get any port.
        **{name: str(ports[port] if owned else 0) for port, name in _PORT_VARIABLES.items()},
        **more_variables,
    }
    try:
        yield Place(tree, ports, most_s, variables, state)
    finally:
        for line in reversed(pids.read_text().split()):
            stop(int(line))
        down = [sys.executable, "-m", "deploy.local", "down"]
        subprocess.run(down, cwd=tree, env=os.environ | variables, check=False)


def _write_programs(folder: Path, packages: Path) -> None:
    """Programs that stand before the real ones: services in the background, make without an installation, pip apart."""
    folder.mkdir()
    stamp = folder / "ready"
    stamp.touch()
    dry = "|".join(DRY_TARGETS)
    ours = os.pathsep.join(map(str, (ROOT, ROOT / "protos", ROOT / "client")))
    here = f"PYTHONPATH={ours} exec {sys.executable} -m tests.documents.background"
    make = f"$(type -ap make | sed -n 2p) --assume-old=pyproject.toml STAMP={stamp} VENV={sys.prefix}"
    extras = ",".join(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    programs = {
        "tokenwire-engine": f'{here} engine "$@"',
        "tokenwire-tokenizer": f'{here} tokenizer "$@"',
        "make": f'case "$1" in {dry}) exec {make} --dry-run "$@";; *) exec {make} "$@";; esac',
        # Our own extras are installed already: they have to exist. Everything else goes into a folder of its own.
        "pip": f'case "$2" in *\\[*\\]) IFS=,; for extra in $(expr "$2" : ".*\\[\\(.*\\)\\]"); do\n'
        f'case ",{extras}," in *",$extra,"*) ;; *) echo "no extra $extra"; exit 1;; esac; done;;\n'
        f'*) exec {sys.executable} -m pip "$1" --quiet --target {packages} "${{@:2}}";; esac',
    }
    for name, script in programs.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
