"""8 simulated engines and 2,000 streams at once through one tokenizer service. Run by hand: `pytest -m load`.

Every token is known (a pure function of seed and position), and the work is spread; then more than the queues hold.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import psutil
import pytest

from engine_service.simulated.step_model import StepModel
from engine_service.simulated.tokens import token_at
from tests.fixtures.stack import ServiceProcess, until, until_serving
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc
from tokenwire_client import AsyncClient, Overloaded, RetryPolicy, Sampling

pytestmark = [pytest.mark.load, pytest.mark.slow, pytest.mark.timeout(600)]

ENGINES, STREAMS, TOKENS = 8, 2000, 40
VOCAB, EOS = 512, frozenset({0})
# 250 requests of an engine take 0.45 s a step: 4,400 tokens a second in all.
STEP = StepModel(0.2, 0.001, 0.0001, 0.0, 0.0)


@contextlib.asynccontextmanager
async def fleet(model: Path, logs: Path, *engine_flags: str) -> AsyncIterator[tuple[str, list[int], ServiceProcess]]:
    """The tokenizer service's address, the engines' ports, the tokenizer service."""
    STEP.save(logs / "step.json", {})
    flags = ("--model", str(model), "--simulate", str(logs / "step.json"), *engine_flags)
    services = [ServiceProcess("engine_service", logs / f"engine-{i}.log", *flags) for i in range(ENGINES)]
    try:
        ports = [await service.port() for service in services]
        engines = [flag for port in ports for flag in ("--engine", f"127.0.0.1:{port}")]
        tokenizer = ServiceProcess(
            "tokenizer_service", logs / "tokenizer.log", "--model", str(model), "--no-http", *engines
        )
        services.append(tokenizer)
        target = f"127.0.0.1:{await tokenizer.port()}"
        await until_serving(target, services)
        await until(lambda: len(tokenizer.events("engine_connected")) == ENGINES, 120)
        yield target, ports, tokenizer
    finally:
        await asyncio.gather(*(service.close() for service in services))


async def load_of(port: int) -> engine_pb2.GetLoadResponse:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        return await engine_pb2_grpc.EngineServiceStub(channel).GetLoad(engine_pb2.GetLoadRequest())


async def one(client: AsyncClient, seed: int, started: float) -> float:
    """Seconds to the first token; the tokens are checked."""
    found: list[int] = []
    first = 0.0
    prompt = [5 + seed % 400, 6, 7, 8 + seed // 400]
    async for delta in client.generate(prompt, Sampling(max_tokens=TOKENS, seed=seed, temperature=1.0)):
        first = first or time.perf_counter() - started
        found.extend(delta.token_ids)
    assert found == [token_at(seed, len(prompt) + place, VOCAB, EOS) for place in range(TOKENS)]
    return first


async def test_two_thousand_streams_over_eight_engines(hist_folder: Path, tmp_path: Path) -> None:
    async with fleet(hist_folder, tmp_path) as (target, ports, tokenizer), AsyncClient(target) as client:
        process = psutil.Process(tokenizer.pid)
        started, cpu = time.perf_counter(), sum(process.cpu_times()[:2])
        firsts = sorted(await asyncio.gather(*(one(client, seed, started) for seed in range(STREAMS))))
        took, used = time.perf_counter() - started, sum(process.cpu_times()[:2]) - cpu
        loads = [await load_of(port) for port in ports]
        rate = STREAMS * TOKENS / took
        print(f"{took:.1f} s, {rate:,.0f} tokens/s, TTFT p50 {firsts[STREAMS // 2]:.2f} s, longest {firsts[-1]:.2f} s")
        print(f"tokenizer service: {used / STREAMS / TOKENS * 1e6:.0f} us of CPU a token, ", end="")
        print(f"{process.memory_info().rss / 1e6:.0f} MB")
        shares = [load.generated_tokens_total / (STREAMS * TOKENS) for load in loads]
        assert sum(shares) == pytest.approx(1.0)
        assert max(shares) < 1.25 / ENGINES
        assert all(load.used_blocks == load.running_requests == 0 for load in loads)


async def test_more_than_the_queues_hold_is_refused_and_the_rest_is_served(hist_folder: Path, tmp_path: Path) -> None:
    flags = ("--max-num-requests", "16", "--max-waiting-requests", "32")
    once = RetryPolicy(attempts=1)
    async with (
        fleet(hist_folder, tmp_path, *flags) as (target, _, _tokenizer),
        AsyncClient(target, retry=once) as client,
    ):
        started = time.perf_counter()
        ends = await asyncio.gather(
            *(one(client, seed, started) for seed in range(ENGINES * 100)), return_exceptions=True
        )
        refused = [end for end in ends if isinstance(end, Overloaded)]
        served = [end for end in ends if isinstance(end, float)]
        assert len(refused) + len(served) == len(ends), {type(end).__name__ for end in ends}
        assert len(served) >= ENGINES * 32
        assert refused
        assert all(end.retry_after for end in refused)
        print(f"{len(served)} served, {len(refused)} refused")
