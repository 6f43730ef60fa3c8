"""Faults of the network between tokenizer service and engine: no stuck stream, no wrong token, nothing left behind.

Two simulated engines, the first behind a proxy that misbehaves: what they say is a pure function of seed and position,
so that every token is known.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from engine_service.simulated.step_model import StepModel
from engine_service.simulated.tokens import token_at
from tests.fixtures.fault_proxy import FaultProxy, fault_proxy
from tests.fixtures.stack import ServiceProcess, until, until_serving
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc
from tokenwire_client import AsyncClient, Completion, Sampling

VOCAB, EOS = 512, frozenset({0})
PROMPT = [7, 8, 9]
TOKENS = 300
STREAMS = 16
HANG_S = 1.0
STEP = StepModel(0.004, 0.0001, 0.00001, 0.0, 0.0)
SLOW_STEP = StepModel(0.05, 0.0001, 0.00001, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Fleet:
    """The first engine is reached through `proxy` alone."""

    engines: tuple[ServiceProcess, ServiceProcess]
    proxy: FaultProxy
    tokenizer: ServiceProcess
    target: str

    async def load(self, place: int) -> engine_pb2.GetLoadResponse:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{await self.engines[place].port()}") as channel:
            return await engine_pb2_grpc.EngineServiceStub(channel).GetLoad(engine_pb2.GetLoadRequest())

    async def until_idle(self, timeout_s: float) -> None:
        async def is_idle() -> bool:
            loads = [await self.load(0), await self.load(1)]
            return all(x.running_requests == x.waiting_requests == x.used_blocks == 0 for x in loads)

        await until(is_idle, timeout_s)


@contextlib.asynccontextmanager
async def running_fleet(model: Path, logs: Path, step: StepModel = STEP) -> AsyncIterator[Fleet]:
    step.save(logs / "step.json", {})
    flags = ("--model", str(model), "--simulate", str(logs / "step.json"))
    engines = tuple(ServiceProcess("engine_service", logs / f"engine-{i}.log", *flags) for i in range(2))
    services = [*engines]
    try:
        addresses = [f"127.0.0.1:{await engine.port()}" for engine in engines]
        async with fault_proxy(addresses[0]) as proxy:
            tokenizer = ServiceProcess(
                "tokenizer_service",
                logs / "tokenizer.log",
                *("--model", str(model), "--engine", proxy.address, "--engine", addresses[1], "--no-http"),
                *("--routing", "round-robin", "--engine-hang-timeout", str(HANG_S)),
            )
            services.append(tokenizer)
            target = f"127.0.0.1:{await tokenizer.port()}"
            await until_serving(target, services)
            await until(lambda: len(tokenizer.events("engine_connected")) == 2, 60)
            yield Fleet((engines[0], engines[1]), proxy, tokenizer, target)
    finally:
        for service in reversed(services):
            await service.close()


def expected(seed: int) -> list[int]:
    return [token_at(seed, len(PROMPT) + place, VOCAB, EOS) for place in range(TOKENS)]


async def stream(client: AsyncClient, seed: int, begun: asyncio.Semaphore) -> tuple[list[int], Completion]:
    """All token ids; `begun` is released when the stream has its first tokens."""
    found: list[int] = []
    answer = client.generate(PROMPT, Sampling(max_tokens=TOKENS, seed=seed, temperature=1.0), timeout=60)
    async for delta in answer:
        if not found:
            begun.release()
        found.extend(delta.token_ids)
    return found, await answer.result()


async def strike(fleet: Fleet, fault: str) -> None:
    match fault:
        case "delay":
            fleet.proxy.delay_s = 0.15
        case "cut":
            fleet.proxy.cut()
        case "reset":
            fleet.proxy.cut(reset=True)
        case "silence":
            fleet.proxy.silence()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(hist_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    async with running_fleet(hist_folder, tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("fault", ["delay", "cut", "reset", "silence"])
async def test_streams_go_on(fleet: Fleet, fault: str) -> None:
    resumed, connected = (len(fleet.tokenizer.events(name)) for name in ("request_resumed", "engine_connected"))
    loses_engine = fault != "delay"
    async with AsyncClient(fleet.target) as client:
        begun = asyncio.Semaphore(0)
        running = [asyncio.create_task(stream(client, seed, begun)) for seed in range(STREAMS)]
        for _ in range(STREAMS):
            await begun.acquire()
        held = (await fleet.load(0)).running_requests
        assert held > 0
        await strike(fleet, fault)
        for seed, (tokens, completion) in enumerate(await asyncio.gather(*running)):
            assert tokens == expected(seed), seed
            assert completion.usage.completion_tokens == TOKENS
            assert completion.usage.prompt_tokens == len(PROMPT)
        assert len(fleet.tokenizer.events("request_resumed")) - resumed == (held if loses_engine else 0)

        fleet.proxy.heal()
        await fleet.until_idle(10.0)
        await until(lambda: len(fleet.tokenizer.events("engine_connected")) == connected + loses_engine, 15.0)
        again = [stream(client, 100 + seed, begun) for seed in range(4)]
        assert [tokens for tokens, _ in await asyncio.gather(*again)] == [expected(100 + seed) for seed in range(4)]
        await fleet.until_idle(10.0)


async def test_a_link_that_never_heals_holds_no_blocks(hist_folder: Path, tmp_path: Path) -> None:
    """The engine misses the heartbeats and ends what it computes for nobody, here for more than 3 minutes."""
    async with running_fleet(hist_folder, tmp_path, SLOW_STEP) as fleet, AsyncClient(fleet.target) as client:
        answers = [client.generate(PROMPT, Sampling(max_tokens=4000, seed=1, temperature=1.0)) for _ in range(4)]
        readers = [aiter(answer) for answer in answers]  # a reader that is dropped ends its stream
        for reader in readers:
            await anext(reader)
        assert (await fleet.load(0)).running_requests > 0
        fleet.proxy.silence()
        for answer in answers:
            await answer.aclose()
        await fleet.until_idle(20.0)
        assert len(fleet.engines[0].events("session_silent")) == 1
