"""Targets that run: each is started until ready, asked to serve a workload, paused while others are measured.

Must not know: rounds, statistics, files of results.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import aiohttp

from benchmarks.serving.closed_loop import Send, run_closed_loop
from benchmarks.serving.drivers.closed_run import Job
from benchmarks.serving.drivers.protocol import order_line
from benchmarks.serving.grpc_clients import engine_client, tokenizer_client
from benchmarks.serving.http_client import http_client
from benchmarks.serving.processes import POLL_S, GroupProcess, TargetFailed, free_port
from benchmarks.serving.records import Record, from_json
from benchmarks.serving.services import start_engine, start_services
from benchmarks.serving.target_specs import Kind, Spec, with_port
from benchmarks.serving.workload import BenchRequest

ROOT = Path(__file__).parents[2]
Open = Callable[[], AbstractAsyncContextManager[Send]]


class Target(Protocol):
    """A started target. `processes` are its own: empty for a server that ran already."""

    @property
    def processes(self) -> Sequence[GroupProcess]: ...

    @property
    def version(self) -> str: ...

    async def run(self, requests: Sequence[BenchRequest], concurrency: int) -> list[Record]: ...


@dataclass(frozen=True, slots=True)
class ServedTarget:
    """A server: each run has connections of its own, so that none has been idle while others were measured."""

    processes: tuple[GroupProcess, ...]
    open_client: Open
    version: str

    async def run(self, requests: Sequence[BenchRequest], concurrency: int) -> list[Record]:
        async with self.open_client() as send:
            return await run_closed_loop(send, requests, concurrency, time.monotonic)


@dataclass(frozen=True, slots=True)
class DriverTarget:
    """An engine inside a driver process, which keeps the closed loop and the time itself."""

    process: GroupProcess
    version: str

    @property
    def processes(self) -> tuple[GroupProcess, ...]:
        return (self.process,)

    async def run(self, requests: Sequence[BenchRequest], concurrency: int) -> list[Record]:
        jobs = [Job(request.key, request.token_ids, request.max_tokens) for request in requests]
        answer = await asyncio.to_thread(self._ask, order_line(jobs, concurrency))
        return [from_json(record) for record in answer["records"]]

    def _ask(self, line: str) -> dict[str, list[dict[str, object]]]:
        stdin = self.process.popen.stdin
        assert stdin is not None
        stdin.write(line.encode())
        stdin.flush()
        return _read_line(self.process)


def _read_line(process: GroupProcess) -> dict[str, list[dict[str, object]]]:
    """TargetFailed when the process ends instead of answering."""
    assert process.popen.stdout is not None
    line = process.popen.stdout.readline()
    if not line:
        process.popen.wait()
        process.assert_alive()
    answer: dict[str, list[dict[str, object]]] = json.loads(line)
    return answer


@asynccontextmanager
async def running_target(spec: Spec, model: Path, logs: Path) -> AsyncIterator[Target]:
    """Starts a target, yields when it is ready, ends it. TargetFailed when it does not get ready in time."""
    processes: list[GroupProcess] = []
    try:
        yield await _start(spec, model, logs / f"{spec.name}.log", processes)
    finally:
        for process in reversed(processes):
            await process.stop()


async def _start(spec: Spec, model: Path, log: Path, processes: list[GroupProcess]) -> Target:
    environment = dict(os.environ) | dict(spec.env)
    deadline = time.monotonic() + spec.start_timeout_s
    match spec.kind:
        case Kind.TOKENWIRE:
            services = await start_services(
                model, log, spec.engine_flags, spec.tokenizer_flags, environment, deadline, processes.append
            )
            return ServedTarget(tuple(processes), lambda: tokenizer_client(services.tokenizer), services.version)
        case Kind.TOKENWIRE_HTTP:
            services = await start_services(
                model, log, spec.engine_flags, spec.tokenizer_flags, environment, deadline, processes.append
            )
            return ServedTarget(tuple(processes), lambda: http_client(services.url, spec.body), services.version)
        case Kind.ENGINE:
            engine = await start_engine(model, log, spec.engine_flags, environment, deadline, processes.append)
            return ServedTarget(tuple(processes), lambda: engine_client(engine.address), engine.version)
        case Kind.HTTP:
            return await _start_http(spec, environment, log, deadline, processes)
        case Kind.DRIVER:
            return await _start_driver(spec, environment, log, processes)


async def _start_driver(
    spec: Spec, environment: Mapping[str, str], log: Path, processes: list[GroupProcess]
) -> DriverTarget:
    path = os.pathsep.join(part for part in (str(ROOT), environment.get("PYTHONPATH", "")) if part)
    process = GroupProcess(spec.command, dict(environment) | {"PYTHONPATH": path}, log, has_pipes=True)
    processes.append(process)
    try:
        async with asyncio.timeout(spec.start_timeout_s):
            greeting = await asyncio.to_thread(_read_line, process)
    except TimeoutError:
        raise TargetFailed(f"{spec.name} was not ready in {spec.start_timeout_s:.0f} s") from None
    return DriverTarget(process, str(greeting["version"]))


async def _start_http(
    spec: Spec, environment: Mapping[str, str], log: Path, deadline: float, processes: list[GroupProcess]
) -> ServedTarget:
    url = spec.url
    if spec.command:
        port = free_port()
        url = url.replace("{port}", str(port)) or f"http://127.0.0.1:{port}"
        processes.append(GroupProcess(with_port(spec.command, port), environment, log))
    await _wait_for_http(spec, url, deadline, processes)
    return ServedTarget(tuple(processes), lambda: http_client(url, spec.body), spec.about)


async def _wait_for_http(spec: Spec, url: str, deadline: float, processes: Sequence[GroupProcess]) -> None:
    """Polls another program's health page, which cannot notify us."""
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=5)) as session:
        while time.monotonic() < deadline:
            for process in processes:
                process.assert_alive()
            try:
                async with session.get(spec.ready_path) as response:
                    if response.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(POLL_S)
    raise TargetFailed(f"{spec.name} was not ready in {spec.start_timeout_s:.0f} s: {url}{spec.ready_path}")


def default_placeholders(model: Path, threads: int, peers: str | None) -> dict[str, str]:
    """What a targets file may name in braces; {peers} only when it is given."""
    values = {"model": str(model), "threads": str(threads), "python": sys.executable}
    return values | ({"peers": str(Path(peers).expanduser().resolve())} if peers else {})
