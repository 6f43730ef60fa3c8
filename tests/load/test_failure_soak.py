"""Half an hour of everything at once: streams, cancels, bad inputs, engines killed. Memory flat, idle at the end.

Run by hand: `pytest -m load tests/load/test_failure_soak.py` (TOKENWIRE_SOAK_MINUTES for another length).
"""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
import numpy as np
import psutil
import pytest

from tests.fixtures.stack import ServiceProcess, gauges, until, until_serving
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc
from tokenwire_client import AsyncClient, InvalidRequest, JsonSchema, Sampling, TokenwireError

MINUTES = float(os.environ.get("TOKENWIRE_SOAK_MINUTES", "30"))
WARM_UP = 1 / 3
KILL_EVERY_S = 20.0
SAMPLE_EVERY_S = 10.0
BACK_AT_IDLE_S = 60.0
WORKERS = 12
FLAGS = ("--num-blocks", "256", "--max-num-requests", "16", "--max-waiting-requests", "64", "--check-invariants")
# What the prefix cache holds is what was asked for last, at idle too; that nothing is lost of it is asserted by itself.
CACHED = {
    "tokenwire_engine_kv_blocks{state=cached}",
    "tokenwire_engine_kv_blocks{state=free}",
    "tokenwire_tokenizer_prefix_map_blocks",
}
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'

pytestmark = [pytest.mark.load, pytest.mark.slow, pytest.mark.timeout(int(MINUTES * 60) + 600)]


@dataclass(slots=True)
class Soak:
    """`spared` is never killed; the other two are, in turn, and come back on their ports."""

    model: Path
    logs: Path
    dice: random.Random
    engines: list[ServiceProcess] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    ends: Counter[str] = field(default_factory=Counter)
    unexpected: list[str] = field(default_factory=list)
    rss: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"tokenizer": [], "spared": []})

    async def start_engine(self, place: int) -> None:
        port = self.ports[place] if place < len(self.ports) else 0
        log = self.logs / f"engine-{place}-{self.ends['engine killed']}.log"
        engine = ServiceProcess("engine_service", log, "--model", str(self.model), *FLAGS, "--port", str(port))
        if place < len(self.ports):
            self.engines[place] = engine
            await engine.port()
        else:
            self.engines.append(engine)
            self.ports.append(await engine.port())

    async def kill_in_turn(self, end: float) -> None:
        """Every engine that was killed has come back when this returns."""
        for place in itertools.cycle((1, 2)):
            await asyncio.sleep(KILL_EVERY_S)  # the rhythm of the faults
            if time.monotonic() > end:
                return
            engine = self.engines[place]
            engine.signal(signal.SIGKILL)
            await engine.wait()
            self.ends["engine killed"] += 1
            await self.start_engine(place)

    async def watch_memory(self, tokenizer: ServiceProcess) -> None:
        started = time.monotonic()
        while True:
            for name, pid in (("tokenizer", tokenizer.pid), ("spared", await self.engine_pid(0))):
                self.rss[name].append((time.monotonic() - started, psutil.Process(pid).memory_info().rss / 1e6))
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def engine_pid(self, place: int) -> int:
        return int((await self.load(place)).engine_pid)

    async def load(self, place: int) -> engine_pb2.GetLoadResponse:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.ports[place]}") as channel:
            return await engine_pb2_grpc.EngineServiceStub(channel).GetLoad(engine_pb2.GetLoadRequest())

    async def work(self, client: AsyncClient, http: httpx.AsyncClient, end: float) -> None:
        """One client that does one thing after the other."""
        acts = (self.stream, self.stream, self.stream, self.cancel, self.bad_input, self.structured, self.deadline)
        while time.monotonic() < end:
            act = self.dice.choice(acts)
            try:
                await (self.by_http(http) if self.dice.random() < 0.2 else act(client))
            except (TokenwireError, httpx.HTTPError, AssertionError) as error:
                self.unexpected.append(f"{act.__name__}: {type(error).__name__}: {error}")

    def prompt(self) -> list[int]:
        return [self.dice.randrange(5, 400) for _ in range(self.dice.randrange(1, 120))]

    async def stream(self, client: AsyncClient) -> None:
        count = self.dice.randrange(1, 200)
        sampling = Sampling(max_tokens=count, ignore_eos=True, temperature=self.dice.choice((0.0, 1.0)), n=1)
        answer = await client.generate(self.prompt(), sampling).result()
        assert answer.usage.completion_tokens == count
        self.ends["stream"] += 1

    async def cancel(self, client: AsyncClient) -> None:
        stream = client.generate(self.prompt(), Sampling(max_tokens=2000, ignore_eos=True))
        left = self.dice.randrange(0, 20)
        async with contextlib.aclosing(stream):
            async for _ in stream:
                left -= 1
                if left <= 0:
                    break
        self.ends["cancel"] += 1

    async def deadline(self, client: AsyncClient) -> None:
        with contextlib.suppress(TokenwireError):
            await client.generate(self.prompt(), Sampling(max_tokens=2000, ignore_eos=True), timeout=0.3).result()
        self.ends["deadline"] += 1

    async def structured(self, client: AsyncClient) -> None:
        with contextlib.suppress(TokenwireError):  # a tiny vocabulary may not be able to say it
            await client.generate(self.prompt(), Sampling(max_tokens=30, structured_output=JsonSchema(SCHEMA))).result()
        self.ends["structured"] += 1

    async def bad_input(self, client: AsyncClient) -> None:
        bad = self.dice.choice(([10**6], [], list(range(5, 400)) * 20))
        with pytest.raises(InvalidRequest):
            await client.generate(bad, Sampling(max_tokens=5)).result()
        self.ends["bad input"] += 1

    def failed_engines(self) -> list[str]:
        """What engines that ended by themselves said: a check of their invariants failed, or a step."""
        logs = [log.read_text(errors="replace") for log in sorted(self.logs.glob("engine-*.log"))]
        return [line for log in logs for line in log.splitlines() if '"event": "engine failed"' in line]

    async def by_http(self, http: httpx.AsyncClient) -> None:
        body = {"model": "hist", "prompt": self.prompt(), "max_tokens": 20, "ignore_eos": True}
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 20
        self.ends["http"] += 1


def slope_per_10_minutes(samples: list[tuple[float, float]]) -> float:
    """MB, by least squares, after the warm-up."""
    kept = [sample for sample in samples if sample[0] >= MINUTES * 60 * WARM_UP]
    return float(np.polyfit(*zip(*kept, strict=True), 1)[0] * 600)


def has_idle_value(name: str) -> bool:
    """Not so what a process is (memory, which has a check of its own, open files, times of its start)."""
    return name not in CACHED and not any(part in name for part in ("process_", "startup_seconds"))


async def until_gauges(
    services: Sequence[ServiceProcess], idle: Sequence[dict[str, float]], request: Callable[[], Awaitable[None]]
) -> None:
    """Every gauge has its idle value again; a series that came with the load has none but zero.

    `request` is sent in between: a breaker of an engine that was killed closes when a request succeeds there.
    """
    missing: list[dict[str, tuple[float, float]]] = []
    deadline = time.monotonic() + BACK_AT_IDLE_S
    while True:
        now = [await gauges(service) for service in services]
        missing = [differing(before, after) for before, after in zip(idle, now, strict=True)]
        if not any(missing):
            return
        assert time.monotonic() < deadline, f"not back at idle (before, now): {missing}"
        await request()


def differing(before: dict[str, float], now: dict[str, float]) -> dict[str, tuple[float, float]]:
    """Gauge -> its value before and now, where they differ; and the sum of free and cached blocks."""
    found = {name: (before.get(name, 0.0), now.get(name, 0.0)) for name in before.keys() | now.keys()}
    blocks = [
        sum(each.get(f"tokenwire_engine_kv_blocks{{state={state}}}", 0.0) for state in ("cached", "free"))
        for each in (before, now)
    ]
    found = {name: pair for name, pair in found.items() if has_idle_value(name)}
    found["cached and free blocks"] = (blocks[0], blocks[1])
    return {name: pair for name, pair in found.items() if pair[0] != pair[1]}


async def test_everything_at_once(hist_folder: Path, tmp_path: Path) -> None:
    soak = Soak(hist_folder, tmp_path, random.Random(1))
    services: list[ServiceProcess] = []
    try:
        for place in range(3):
            await soak.start_engine(place)
        engine_flags = [flag for port in soak.ports for flag in ("--engine", f"127.0.0.1:{port}")]
        tokenizer = ServiceProcess(
            "tokenizer_service",
            tmp_path / "tokenizer.log",
            *("--model", str(hist_folder), "--served-model-name", "hist", "--http-port", "0", *engine_flags),
        )
        services.append(tokenizer)
        target = f"127.0.0.1:{await tokenizer.port()}"
        await until_serving(target, [tokenizer])
        await until(lambda: len(tokenizer.events("engine_connected")) == 3, 60)
        url = f"http://127.0.0.1:{await tokenizer.port('http_port')}"
        idle = [await gauges(service) for service in (tokenizer, *soak.engines)]
        async with AsyncClient(target) as client, httpx.AsyncClient(base_url=url, timeout=60) as http:
            end = time.monotonic() + MINUTES * 60
            watch = asyncio.create_task(soak.watch_memory(tokenizer))
            await asyncio.gather(soak.kill_in_turn(end), *(soak.work(client, http, end) for _ in range(WORKERS)))
            watch.cancel()
            (ended,) = await asyncio.gather(watch, return_exceptions=True)
            assert isinstance(ended, asyncio.CancelledError), ended
            await until_gauges((tokenizer, *soak.engines), idle, lambda: soak.stream(client))
        slopes = {name: slope_per_10_minutes(samples) for name, samples in soak.rss.items()}
        print(dict(soak.ends), f"slopes {slopes} MB in 10 minutes", f"RSS {[s[-1][1] for s in soak.rss.values()]} MB")
        assert soak.unexpected == [], Counter(word.partition(":")[0] for word in soak.unexpected)
        assert max(slopes.values()) < 1.0
        assert soak.failed_engines() == []
        assert '"level": "error"' not in tokenizer.log.read_text().replace("engine_session_failed", "")
    finally:
        for service in (*services, *soak.engines):
            await service.close()
