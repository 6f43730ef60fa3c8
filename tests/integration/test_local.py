"""`make run`, `make up` and `make down` as a user starts them, on a small checkpoint."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from deploy.local import is_running
from tests.fixtures.stack import until

ROOT = Path(__file__).resolve().parents[2]


class Local:
    """`python -m deploy.local` in a folder of its own, with any free ports; ends what is left at the end."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "TOKENWIRE_ENGINE_MODEL": str(model),
            "TOKENWIRE_ENGINE_NUM_BLOCKS": "64",
            "TOKENWIRE_TOKENIZER_MODEL": str(model),
            "TOKENWIRE_TOKENIZER_HTTP_PORT": "0",
            **{f"TOKENWIRE_{s}_{p}": "0" for s in ("ENGINE", "TOKENIZER") for p in ("PORT", "METRICS_PORT")},
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "deploy.local", *arguments]
        return subprocess.Popen(
            command,
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def call(self, *arguments: str) -> tuple[int, str]:
        """Exit code and output."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def pids(self) -> dict[str, int]:
        return {file.stem: int(file.read_text()) for file in (self.folder / ".run").glob("*.pid")}


@pytest.fixture
def local(tmp_path: Path, succ_folder: Path) -> Iterator[Local]:
    made = Local(tmp_path, succ_folder)
    yield made
    made.call("down")


def test_up_serves_until_down(local: Local) -> None:
    code, output = local.call("up")
    assert code == 0, output
    pids = local.pids()
    assert set(pids) == {"engine", "tokenizer"}
    assert all(is_running(pid) for pid in pids.values())
    address = output.split("gRPC ")[1].split(",")[0]
    health = [sys.executable, "-m", "tokenwire_client.cli", "health", "--target", address]
    assert subprocess.run(health, capture_output=True, text=True, check=False).stdout == "serving\n"
    code, output = local.call("up")
    assert (code, "already up" in output) == (1, True)
    assert local.pids() == pids
    assert local.call("down") == (0, "")
    assert not any(is_running(pid) for pid in pids.values())
    assert local.pids() == {}


def test_up_that_cannot_bind_says_so_and_leaves_nothing(local: Local) -> None:
    """Also when another stack answers at that port: ours is what must be ready."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        local.environment["TOKENWIRE_TOKENIZER_PORT"] = port
        code, output = local.call("up")
    assert code == 1
    assert f"cannot listen on 127.0.0.1:{port}" in output
    assert "Traceback" not in output
    assert local.pids() == {}


def test_run_answers_and_stops_both_services(local: Local) -> None:
    code, output = local.call("run", "--prompt=--Hello")
    assert code == 0, output
    assert "finish_reason=" in output


async def test_a_run_that_is_told_to_end_ends_its_services(local: Local) -> None:
    """`timeout 60 make run`: SIGTERM while the services start must not leave them behind."""
    process = local.start("run")
    log = local.folder / ".run" / "run-engine.log"
    await until(lambda: log.is_file() and "listening" in log.read_text(), 60)
    family = psutil.Process(process.pid).children(recursive=True)
    assert family
    process.send_signal(signal.SIGTERM)
    await until(lambda: process.poll() is not None, 30)
    assert process.returncode == 128 + signal.SIGTERM
    await until(lambda: not any(member.is_running() for member in family), 5)
