"""Our own services as targets: started on free ports, ready when they say so.

Must not know: what is measured.
"""

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.serving.processes import POLL_S, GroupProcess, TargetFailed
from tokenwire_client import AsyncClient, TokenwireError

Started = Callable[[GroupProcess], None]
"""Told of each process as soon as it exists, so that it is ended whatever happens next."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A ready engine service."""

    process: GroupProcess
    address: str
    version: str


@dataclass(frozen=True, slots=True)
class Services:
    """Both services, ready: addresses of the two, and the base URL of the HTTP endpoint."""

    engine: Engine
    tokenizer: str
    url: str
    version: str


async def start_engine(
    model: Path,
    log: Path,
    flags: Sequence[str],
    environment: Mapping[str, str],
    deadline: float,
    started: Started,
) -> Engine:
    """Returns once the engine process has loaded the model."""
    process = _service("engine_service", log.with_suffix(".engine.log"), model, flags, environment)
    started(process)
    port = int(str((await logged_event(process, "listening", deadline))["grpc_port"]))
    await logged_event(process, "engine ready", deadline)
    return Engine(process, f"127.0.0.1:{port}", f"tokenwire {version('tokenwire')}")


async def start_services(
    model: Path,
    log: Path,
    engine_flags: Sequence[str],
    tokenizer_flags: Sequence[str],
    environment: Mapping[str, str],
    deadline: float,
    started: Started,
) -> Services:
    """Returns once the tokenizer service is SERVING, for which it needs the engine."""
    engine = await start_engine(model, log, engine_flags, environment, deadline, started)
    flags = ("--engine", engine.address, *tokenizer_flags)
    target, url = await start_tokenizer(model, log, flags, environment, deadline, started)
    return Services(engine, target, url, engine.version)


async def start_tokenizer(
    model: Path, log: Path, flags: Sequence[str], environment: Mapping[str, str], deadline: float, started: Started
) -> tuple[str, str]:
    """The gRPC address and the HTTP URL, once the service is SERVING; `flags` name its engines."""
    process = _service(
        "tokenizer_service", log.with_suffix(".tokenizer.log"), model, ("--http-port", "0", *flags), environment
    )
    started(process)
    listening = await logged_event(process, "listening", deadline)
    target = f"127.0.0.1:{listening['grpc_port']}"
    await _wait_until_serving(target, process, deadline)
    return target, f"http://127.0.0.1:{listening['http_port']}"


def _service(module: str, log: Path, model: Path, flags: Sequence[str], environment: Mapping[str, str]) -> GroupProcess:
    ports = ("--port", "0", "--metrics-port", "0")
    command = [sys.executable, "-m", module, *ports, "--log-format", "json", "--model", str(model), *flags]
    return GroupProcess(command, environment, log)


async def logged_event(process: GroupProcess, name: str, deadline: float) -> dict[str, object]:
    """The first logged event of that name. TargetFailed when the process ends or is late."""
    while time.monotonic() < deadline:
        for line in process.log.read_text(errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                event: dict[str, object] = json.loads(line)
                if event.get("event") == name:
                    return event
        process.assert_alive()
        await asyncio.sleep(POLL_S)
    raise TargetFailed(f"no event {name!r} in time:\n{process.log_end()}")


async def _wait_until_serving(target: str, process: GroupProcess, deadline: float) -> None:
    async with AsyncClient(target) as client:
        while time.monotonic() < deadline:
            with contextlib.suppress(TokenwireError):
                if (await client.health(timeout=1.0)).serving:
                    return
            process.assert_alive()
            await asyncio.sleep(POLL_S)
    raise TargetFailed(f"the services were not ready in time:\n{process.log_end()}")
