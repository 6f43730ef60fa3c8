"""Runs both services on this machine: `run` answers one prompt and stops, `up` and `down` keep them.

Must not know: what is inside the services; they are started, watched and stopped as processes.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenwire_client.errors import TokenwireError
from tokenwire_client.sync import Client

RUN_FOLDER = Path(".run")
SERVICES = ("engine", "tokenizer")
MODULES = {"engine": "engine_service", "tokenizer": "tokenizer_service"}
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 40.0
POLL_S = 0.05
SAMPLE_PROMPT = "What is the capital of France? Answer briefly."


class StartFailed(Exception):
    """A service ended, or did not become ready in time; the message says which and where its log is."""


@dataclass(frozen=True, slots=True)
class Service:
    """A service process that this program started; its log lies at `log`."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def assert_alive(self) -> None:
        if self.process.poll() is not None:
            lines = self.log.read_text(errors="replace").splitlines()[-5:]
            raise StartFailed(
                f"the {self.name} service ended with code {self.process.returncode}; the end of {self.log}:\n"
                + "\n".join(lines)
            )


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports a service says it listens on."""

    grpc: int
    metrics: int
    http: int | None = None


def start_service(name: str, log: Path, *flags: str) -> Service:
    """Starts a service in the background, in a session of its own."""
    log.parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", MODULES[name], "--log-format", "json", *flags]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)  # noqa: S603
    return Service(name, process, log)


def wait_for_ports(service: Service, deadline: float) -> Ports:
    """The ports of a service that listens. Raises StartFailed."""
    while time.monotonic() < deadline:
        for line in service.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
                if event.get("event") == "listening":
                    return Ports(int(event["grpc_port"]), int(event["metrics_port"]), event.get("http_port"))
        service.assert_alive()
        time.sleep(POLL_S)
    raise StartFailed(f"the {service.name} service did not listen in time; its log is {service.log}")


def wait_until_ready(services: list[Service], target: str, deadline: float) -> None:
    """Returns when the tokenizer service at `target` is SERVING (then an engine is, too), or StartFailed."""
    with Client(target) as client:
        while time.monotonic() < deadline:
            for service in services:
                service.assert_alive()
            with contextlib.suppress(TokenwireError):
                if client.health(timeout=1.0).serving:
                    return
            time.sleep(POLL_S)
    raise StartFailed(f"the services were not ready after {READY_TIMEOUT_S:.0f} s; their logs are in {RUN_FOLDER}/")


class Stack:
    """Both services of one `run` or `up`: started one after the other, ended together."""

    def __init__(self, prefix: str, on_start: Callable[[Service], None]) -> None:
        """`prefix` begins the names of the logs; `on_start` is told of each service as soon as it runs."""
        self._prefix = prefix
        self._on_start = on_start
        self._services: list[Service] = []

    def start(self, *flags: str, tokenizer_flags: tuple[str, ...] = ()) -> tuple[Ports, Ports]:
        """Ports of engine and tokenizer service (`flags` for both) once an answer can be given. Raises StartFailed."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        engine = wait_for_ports(self._start("engine", *flags), deadline)
        address = f"127.0.0.1:{engine.grpc}"
        flags = (*flags, "--engine", address, *tokenizer_flags)
        tokenizer = wait_for_ports(self._start("tokenizer", *flags), deadline)
        wait_until_ready(self._services, f"127.0.0.1:{tokenizer.grpc}", deadline)
        return engine, tokenizer

    def stop(self) -> None:
        for service in reversed(self._services):
            stop(service.process.pid)
            service.process.wait()

    def _start(self, name: str, *flags: str) -> Service:
        service = start_service(name, RUN_FOLDER / f"{self._prefix}{name}.log", *flags)
        self._services.append(service)
        self._on_start(service)
        return service


def run(prompt: str | None) -> int:
    """Streams an answer to `prompt`; on a terminal without one, stays as a chat. Returns the exit code."""
    print("starting engine and tokenizer service ...", file=sys.stderr)
    is_interactive = prompt is None and sys.stdin.isatty() and sys.stdout.isatty()
    stack = Stack("run-", on_start=lambda service: None)
    try:
        _, tokenizer = stack.start("--port", "0", "--metrics-port", "0", tokenizer_flags=("--no-http",))
        command = [sys.executable, "-m", "tokenwire_client.cli", "chat", "--target", f"127.0.0.1:{tokenizer.grpc}"]
        if not is_interactive:
            text = prompt or SAMPLE_PROMPT
            print(f"> {text}", file=sys.stderr)
            command += ["--temperature", "0", "--max-tokens", "256", "--stats", "--", text]
        return subprocess.run(command, check=False).returncode  # noqa: S603
    finally:
        stack.stop()


def up() -> int:
    """Starts both services on the default ports, returns when they are ready."""
    if any(is_running(read_pid(name)) for name in SERVICES):
        print("already up (make down stops it)", file=sys.stderr)
        return 1
    stack = Stack("", on_start=note_pid)
    try:
        engine, tokenizer = stack.start()
    except BaseException:
        stack.stop()
        down()
        raise
    print(
        f"ready: http://127.0.0.1:{tokenizer.http}/, gRPC 127.0.0.1:{tokenizer.grpc}, engine 127.0.0.1:{engine.grpc}, "
        f"metrics {tokenizer.metrics} and {engine.metrics}, logs in {RUN_FOLDER}/"
    )
    return 0


def down() -> int:
    """Stops what `up` started, tokenizer first."""
    for name in reversed(SERVICES):
        pid = read_pid(name)
        if is_running(pid):
            stop(pid)
        (RUN_FOLDER / f"{name}.pid").unlink(missing_ok=True)
    return 0


def note_pid(service: Service) -> None:
    """For `down`, which is another process."""
    (RUN_FOLDER / f"{service.name}.pid").write_text(str(service.process.pid))


def read_pid(name: str) -> int:
    """The pid that `up` noted for a service, 0 when there is none."""
    file = RUN_FOLDER / f"{name}.pid"
    return int(file.read_text()) if file.is_file() else 0


def is_running(pid: int) -> bool:
    """Whether `pid` is one of our services: a pid may have been given to another program since."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
    return any(module.encode() in command for module in MODULES.values())


def stop(pid: int) -> None:
    """SIGTERM, then SIGKILL when the service outlives its grace period."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline and not has_ended(pid):
            time.sleep(POLL_S)
        if not has_ended(pid):
            os.kill(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG)[0] == pid:
            return True
    return not is_running(pid)


def main() -> int:
    parser = argparse.ArgumentParser(prog="deploy.local", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("run", help="answer one prompt and stop").add_argument("--prompt")
    commands.add_parser("up", help="both services in the background on the default ports")
    commands.add_parser("down", help="stop what up started")
    arguments = parser.parse_args()
    # The services live in sessions of their own: ended without a word, we would leave them behind.
    signal.signal(signal.SIGTERM, _end)
    try:
        if arguments.command == "run":
            return run(arguments.prompt)
        return up() if arguments.command == "up" else down()
    except StartFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _end(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
