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
from collections.abc import Iterator
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
DEFAULT_TARGET = "127.0.0.1:50050"
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


def start_service(name: str, *flags: str) -> Service:
    """Starts a service in the background in a session of its own, its log in `.run/`."""
    RUN_FOLDER.mkdir(exist_ok=True)
    log = RUN_FOLDER / f"{name}.log"
    command = [sys.executable, "-m", MODULES[name], "--log-format", "json", *flags]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, start_new_session=True)  # noqa: S603
    return Service(name, process, log)


def wait_for_port(service: Service, deadline: float) -> int:
    """The gRPC port the service says it listens on. Raises StartFailed."""
    while time.monotonic() < deadline:
        for line in service.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                event = json.loads(line)
                if event.get("event") == "listening":
                    return int(event["grpc_port"])
        service.assert_alive()
        time.sleep(POLL_S)
    raise StartFailed(f"the {service.name} service did not listen in time; its log is {service.log}")


def wait_until_ready(services: list[Service], target: str, deadline: float) -> None:
    """Returns when the tokenizer service at `target` is SERVING (then an engine is, too), or StartFailed."""
    with Client(target) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(TokenwireError):
                if client.health(timeout=1.0).serving:
                    return
            for service in services:
                service.assert_alive()
            time.sleep(POLL_S)
    raise StartFailed(f"the services were not ready after {READY_TIMEOUT_S:.0f} s; their logs are in {RUN_FOLDER}/")


@contextlib.contextmanager
def stack_on_free_ports() -> Iterator[str]:
    """Both services on free loopback ports; yields the tokenizer's address and stops both at the end."""
    services: list[Service] = []
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        services.append(start_service("engine", "--port", "0", "--metrics-port", "0"))
        engine_port = wait_for_port(services[0], deadline)
        engine = f"127.0.0.1:{engine_port}"
        services.append(start_service("tokenizer", "--port", "0", "--metrics-port", "0", "--engine", engine))
        target = f"127.0.0.1:{wait_for_port(services[1], deadline)}"
        wait_until_ready(services, target, deadline)
        yield target
    finally:
        for service in reversed(services):
            stop(service.process.pid)
            service.process.wait()


def run(prompt: str | None) -> int:
    """Streams an answer to `prompt`; on a terminal without one, stays as a chat. Returns the exit code."""
    print("starting engine and tokenizer service ...", file=sys.stderr)
    is_interactive = prompt is None and sys.stdin.isatty() and sys.stdout.isatty()
    with stack_on_free_ports() as target:
        command = [sys.executable, "-m", "tokenwire_client.cli", "chat", "--target", target]
        if not is_interactive:
            text = prompt or SAMPLE_PROMPT
            print(f"> {text}", file=sys.stderr)
            command += ["--temperature", "0", "--max-tokens", "256", "--stats", text]
        return subprocess.run(command, check=False).returncode  # noqa: S603


def up() -> int:
    """Starts both services on the default ports, returns when they are ready."""
    if any(is_running(read_pid(name)) for name in SERVICES):
        print("already up (make down stops it)", file=sys.stderr)
        return 1
    services = [start_service(name) for name in SERVICES]
    for service in services:
        (RUN_FOLDER / f"{service.name}.pid").write_text(str(service.process.pid))
    try:
        wait_until_ready(services, DEFAULT_TARGET, time.monotonic() + READY_TIMEOUT_S)
    except StartFailed:
        down()
        raise
    print(f"ready: gRPC {DEFAULT_TARGET}, engine 127.0.0.1:50051, metrics 9090 and 9091, logs in {RUN_FOLDER}/")
    return 0


def down() -> int:
    """Stops what `up` started, tokenizer first."""
    for name in reversed(SERVICES):
        pid = read_pid(name)
        if is_running(pid):
            stop(pid)
        (RUN_FOLDER / f"{name}.pid").unlink(missing_ok=True)
    return 0


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
    try:
        if arguments.command == "run":
            return run(arguments.prompt)
        return up() if arguments.command == "up" else down()
    except StartFailed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
