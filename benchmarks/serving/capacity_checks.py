"""Checks of start, memory, throughput: against a busy neighbour, at more concurrency, with and without services.

Must not know: other checks.
"""

import os
import sys
import time
from contextlib import AsyncExitStack

from benchmarks.serving.check_tools import Finding, Setting, own_services
from benchmarks.serving.closed_loop import run_closed_loop
from benchmarks.serving.grpc_clients import tokenizer_client
from benchmarks.serving.processes import GroupProcess
from benchmarks.serving.rounds import Settings, pause, play
from benchmarks.serving.summary import Row, summarise
from benchmarks.serving.target_specs import DEFAULT_FILE, read_specs, with_engine_flags
from benchmarks.serving.targets import Target, default_placeholders, running_target
from benchmarks.serving.workload import Shape, make_workload

_SHAPE = Shape(100, 64)


async def start(setting: Setting) -> list[Finding]:
    """Start to ready of both services when all caches are warm, and the engine's memory after some work."""
    async with own_services(setting):
        pass
    begin = time.monotonic()
    async with own_services(setting, "--kv-cache-memory", "1GiB") as services:
        ready_s = time.monotonic() - begin
        async with tokenizer_client(services.tokenizer) as send:
            requests = make_workload(setting.words, _SHAPE, 8, setting.seed)
            await run_closed_loop(send, requests, 8, time.monotonic)
        memory = services.engine.process.memory_bytes() / 2**30
    return [
        Finding("second start to ready", ready_s, 6.0, "s"),
        Finding("RSS of the engine with 1 GiB of KV", memory, 2.2, "GiB", "front and engine process"),
    ]


async def busy_neighbour(setting: Setting) -> list[Finding]:
    """Decoding one request with 2 threads beside a process that never sleeps, to 1 thread alone."""
    one = await _rows(setting, ("tokenwire",), (1,), threads=1)
    neighbour = GroupProcess(
        [sys.executable, "-c", "while True: pass"], dict(os.environ), setting.logs / "neighbour.log"
    )
    try:
        two = await _rows(setting, ("tokenwire",), (1,), threads=2)
    finally:
        await neighbour.stop()
    alone, beside = one[0].tokens_per_s.median, two[0].tokens_per_s.median
    detail = f"1 thread alone {alone:.0f} tok/s, 2 threads beside it {beside:.0f}"
    return [
        Finding("2 threads with a busy neighbour to 1 thread without", beside / alone, 0.6, "", detail, is_floor=True)
    ]


async def growth(setting: Setting) -> list[Finding]:
    """Tokens per second at concurrency 64 to 32."""
    rows = await _rows(setting, ("tokenwire",), (32, 64), threads=setting.threads)
    at_32, at_64 = (row.tokens_per_s.median for row in rows)
    detail = f"{at_32:.0f} and {at_64:.0f} tok/s"
    return [Finding("tokens per second at concurrency 64 to 32", at_64 / at_32, 1.0, "", detail, is_floor=True)]


async def services_cost(setting: Setting) -> list[Finding]:
    """What both services and gRPC cost, to the same engine in one process without sockets."""
    rows = await _rows(setting, ("tokenwire", "inprocess"), (1, 32), threads=setting.threads, rounds=2)
    found = {(row.target, row.concurrency): row for row in rows}
    loss = 1 - found["tokenwire", 32].ratio.median
    served, alone = found["tokenwire", 1].ttft_p50_ms.median, found["inprocess", 1].ttft_p50_ms.median
    detail = f"{served:.1f} and {alone:.1f} ms"
    return [
        Finding("throughput that the services cost at concurrency 32", loss * 100, 6.0, "%"),
        Finding("TTFT that the services add at concurrency 1", served - alone, 2.0, "ms", detail),
    ]


async def _rows(
    setting: Setting, names: tuple[str, ...], concurrency: tuple[int, ...], *, threads: int, rounds: int = 1
) -> list[Row]:
    """The named targets of targets.toml, played; ratios are to the last of them."""
    settings = Settings(rounds, concurrency, setting.requests, _SHAPE, setting.seed)
    placeholders = default_placeholders(setting.model, threads, None)
    targets: dict[str, Target] = {}
    async with AsyncExitStack() as stack:
        for spec in read_specs(DEFAULT_FILE, placeholders, names):
            own = with_engine_flags(spec, setting.engine_flags)
            targets[spec.name] = await stack.enter_async_context(running_target(own, setting.model, setting.logs))
            pause(targets[spec.name])
        turns = await play(targets, settings, setting.words, lambda _: None)
    if failed := [turn.first_error for turn in turns if turn.first_error]:
        raise RuntimeError(failed[0])
    return summarise(turns, names[-1])
