"""All services are replaced one after the other while clients stream: no request fails."""

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.fixtures.stack import READY_TIMEOUT_S, ServiceProcess, until, until_serving
from tests.integration.probes import FOREVER, forever, forever_ids
from tokenwire_client import AsyncClient

NUM_CLIENTS = 6
LONG, SHORT = 1500, 20


@dataclass(slots=True)
class Fleet:
    """Two engines and two tokenizer services, each on a port of its own for good."""

    model: Path
    logs: Path
    engine_grace_s: float
    running: dict[str, ServiceProcess] = field(default_factory=dict)
    flags: dict[str, tuple[str, ...]] = field(default_factory=dict)
    generation: int = 0

    async def start(self) -> None:
        flags = ("--num-blocks", "1024", "--drain-timeout", str(self.engine_grace_s))
        engines = [self._launch(name, "engine_service", *flags) for name in ("engine-1", "engine-2")]
        addresses = [f"127.0.0.1:{await engine.port()}" for engine in engines]
        links = [flag for address in addresses for flag in ("--engine", address)]
        for name in ("tokenizer-1", "tokenizer-2"):
            await self._launch(name, "tokenizer_service", "--no-http", *links).port()
        for name, service in self.running.items():
            self.flags[name] += ("--port", str(await service.port()))
        for name in ("tokenizer-1", "tokenizer-2"):
            await self.until_connected(name, 2)

    async def replace(self, name: str) -> None:
        """SIGTERM, the end (exit code 0), and the same again on the same port."""
        old = self.running[name]
        old.signal(signal.SIGTERM)
        assert await old.wait() == 0, name
        module, *flags = self.flags[name]
        await self._launch(name, module, *flags).port()

    async def until_connected(self, tokenizer: str, engines: int) -> None:
        """The tokenizer service has connected to an engine so many times since its start."""
        service = self.running[tokenizer]
        await until(lambda: len(service.events("engine_connected")) >= engines, READY_TIMEOUT_S)
        await until_serving(self.target(tokenizer), [service])

    def target(self, name: str) -> str:
        return f"127.0.0.1:{self.running[name].events('listening')[0]['grpc_port']}"

    def _launch(self, name: str, module: str, *flags: str) -> ServiceProcess:
        self.flags[name] = (module, *flags)
        self.generation += 1
        log = self.logs / f"{name}.{self.generation}.log"
        self.running[name] = ServiceProcess(module, log, "--model", str(self.model), *flags)
        return self.running[name]

    async def close(self) -> None:
        await asyncio.gather(*(service.close() for service in self.running.values()))


@asynccontextmanager
async def running_fleet(model: Path, logs: Path, engine_grace_s: float) -> AsyncIterator[Fleet]:
    fleet = Fleet(model, logs, engine_grace_s)
    try:
        await fleet.start()
        yield fleet
    finally:
        await fleet.close()


@dataclass(slots=True)
class Load:
    """A closed loop of streams; every answer is compared. `failures` are exceptions and wrong answers."""

    client: AsyncClient
    served: int = 0
    failures: list[object] = field(default_factory=list)
    is_over: bool = False

    async def run(self) -> None:
        await asyncio.gather(*(self._worker(place) for place in range(NUM_CLIENTS)))

    async def _worker(self, place: int) -> None:
        while not self.is_over:
            count = LONG if (place + self.served) % 2 else SHORT
            try:
                completion = await self.client.generate(FOREVER, forever(count), timeout=60).result()
            except Exception as error:
                self.failures.append(error)
                continue
            self.served += 1
            if completion.token_ids != forever_ids(count):
                self.failures.append(completion)


@pytest.mark.slow
@pytest.mark.parametrize("engine_grace_s", [30.0, 0.1], ids=["streams finish", "streams go on elsewhere"])
async def test_no_request_fails_while_all_services_are_replaced(
    succ_folder: Path, tmp_path: Path, engine_grace_s: float
) -> None:
    async with running_fleet(succ_folder, tmp_path, engine_grace_s) as fleet:
        targets = [fleet.target("tokenizer-1"), fleet.target("tokenizer-2")]
        async with AsyncClient(targets) as client:
            load = Load(client)
            running = asyncio.create_task(load.run())
            for place, engine in enumerate(("engine-1", "engine-2"), start=1):
                await fleet.replace(engine)
                for tokenizer in ("tokenizer-1", "tokenizer-2"):
                    await fleet.until_connected(tokenizer, 2 + place)
            for tokenizer in ("tokenizer-1", "tokenizer-2"):
                before = load.served
                await fleet.replace(tokenizer)
                await fleet.until_connected(tokenizer, 2)
                assert load.served > before, "nothing was served meanwhile"
            load.is_over = True
            await running
    assert load.failures == []
    assert load.served > 4 * NUM_CLIENTS
    logs = "".join(log.read_text() for log in tmp_path.glob("tokenizer-*.log"))
    assert ('"request_resumed"' in logs) is (engine_grace_s < 1.0)
