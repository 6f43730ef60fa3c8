"""Checks of latency: cached prefixes, decoding beside a long prefill, a long queue.

Must not know: other checks, limits of other machines.
"""

import asyncio
import statistics
import time

import grpc

from benchmarks.serving.check_tools import Finding, Setting, Streams, own_engine, own_services
from benchmarks.serving.closed_loop import Send, record_one
from benchmarks.serving.grpc_clients import engine_client, tokenizer_client
from benchmarks.serving.measures import quantile
from benchmarks.serving.workload import BenchRequest, Shape, make_workload
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

_PROMPTS = 5
_LONG_PROMPTS = 3
_QUEUED = 2000
_STEPS = 60
_BOUND_S = 55.0


async def cached_prefix(setting: Setting) -> list[Finding]:
    """TTFT of a 1,000-token prompt that was just served, to its first one."""
    requests = make_workload(setting.words, Shape(1000, 4), _PROMPTS + 1, setting.seed)
    cold, cached = [], []
    async with own_services(setting) as services, tokenizer_client(services.tokenizer) as send:
        await _ttft(send, requests[0])  # warms up
        for request in requests[1:]:
            cold.append(await _ttft(send, request))
            cached.append(await _ttft(send, request))
    ratio = statistics.median(cached) / statistics.median(cold)
    detail = f"cold {statistics.median(cold) * 1e3:.0f} ms, cached {statistics.median(cached) * 1e3:.0f} ms"
    return [Finding("TTFT of a cached 1,000-token prompt to cold", ratio, 0.15, "", detail)]


async def _ttft(send: Send, request: BenchRequest) -> float:
    record = await record_one(send, request, time.monotonic)
    if record.error is not None:
        raise RuntimeError(record.error)
    return record.arrivals[0][0] - record.sent


async def long_prefill(setting: Setting) -> list[Finding]:
    """ITL p99 of 8 streams while a 4,000-token prompt is computed, to their p99 without."""
    running = make_workload(setting.words, Shape(100, 4000), 8, setting.seed)
    long = make_workload(setting.words, Shape(4000, 1), _LONG_PROMPTS, setting.seed + 1)
    windows: list[tuple[float, float]] = []
    async with own_services(setting) as services, tokenizer_client(services.tokenizer) as send:
        streams = Streams(send, time.monotonic)
        streams.start(running)
        try:
            async with asyncio.timeout(_BOUND_S):
                await streams.progress(5)
                quiet_from = time.monotonic()
                await streams.progress(_STEPS)
                quiet_to = time.monotonic()
                for request in long:
                    begin = time.monotonic()
                    await _ttft(send, request)
                    windows.append((begin, time.monotonic()))
                    await streams.progress(10)
        finally:
            await streams.leave()
    quiet = _p99(streams.gaps(quiet_from, quiet_to))
    during = _p99([gap for window in windows for gap in streams.gaps(*window)])
    ttft = statistics.median(end - begin for begin, end in windows)
    detail = f"{quiet * 1e3:.0f} ms without, {during * 1e3:.0f} ms during; the long prompt's TTFT {ttft * 1e3:.0f} ms"
    return [Finding("ITL p99 of 8 streams during a 4,000-token prefill to normal", during / quiet, 2.5, "", detail)]


def _p99(seconds: list[float]) -> float:
    return quantile(sorted(seconds), 0.99)


async def long_queue(setting: Setting) -> list[Finding]:
    """Step time with 2,000 requests waiting to that without, alternated, and memory per waiting request."""
    running = make_workload(setting.words, Shape(100, 4000), 32, setting.seed)
    waiting = make_workload(setting.words, Shape(100, 16), _QUEUED, setting.seed + 1)
    without, beside, memory = [], [], []
    flags = ("--max-num-requests", str(len(running)))
    async with own_engine(setting, *flags) as engine, engine_client(engine.address) as send:
        streams = Streams(send, time.monotonic)
        streams.start(running)
        try:
            async with asyncio.timeout(_BOUND_S):
                await streams.progress(5)
                for _ in range(2):
                    without.append(await _step_s(streams))
                    before = engine.process.memory_bytes()
                    queue = Streams(send, time.monotonic)
                    queue.start(waiting)
                    await _until_waiting(engine.address, _QUEUED)
                    memory.append(engine.process.memory_bytes() - before)
                    beside.append(await _step_s(streams))
                    await queue.leave()
                    await _until_waiting(engine.address, 0)
                without.append(await _step_s(streams))
        finally:
            await streams.leave()
    ratio = statistics.median(beside) / statistics.median(without)
    detail = f"{statistics.median(without) * 1e3:.1f} ms without, {statistics.median(beside) * 1e3:.1f} ms beside"
    per_request = max(memory) / _QUEUED / 1000
    return [
        Finding("step time beside 2,000 queued requests to without", ratio, 1.05, "", detail),
        Finding("memory per waiting request of 100 tokens", per_request, 20.4, "kB", "front and engine process"),
    ]


async def _step_s(streams: Streams) -> float:
    """The median gap over some steps from now."""
    begin = time.monotonic()
    await streams.progress(_STEPS)
    return statistics.median(streams.gaps(begin, time.monotonic()))


async def _until_waiting(address: str, count: int) -> None:
    """Polls the engine, which tells nobody of its queue unasked."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        while (await stub.GetLoad(engine_pb2.GetLoadRequest())).waiting_requests != count:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
