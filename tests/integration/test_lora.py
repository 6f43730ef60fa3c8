"""Adapters through both services as processes: models by name, on the engines that have them, over failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, NotFoundError

from tests.fixtures.adapters import FOUR, PeftReference, write_adapter
from tests.fixtures.checkpoints import HIST_VOCAB
from tests.fixtures.fleet import Fleet, FleetEngine, running_fleet
from tests.fixtures.stack import until
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc
from tokenwire_client import AsyncClient, Sampling

pytestmark = pytest.mark.asyncio(loop_scope="module")

COUNT = 16
PROMPT = [number * 7 % HIST_VOCAB for number in range(1, 60)]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": COUNT, "extra_body": {"ignore_eos": True}}
NAMES = ("red", "green", "blue")


@pytest.fixture(scope="module")
def folder(hist_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("adapters")
    for seed, (name, shape) in enumerate(zip(NAMES, FOUR, strict=False), 1):
        write_adapter(place / name, hist_folder, shape, seed)
    return place


@pytest.fixture(scope="module")
def reference(hist_folder: Path, folder: Path) -> PeftReference:
    return PeftReference(hist_folder, {name: folder / name for name in NAMES})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fleet(hist_folder: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fleet]:
    """Two engines with red and green; blue can be loaded."""
    named = [f"--lora={name}={folder / name}" for name in NAMES[:2]]
    flags = (*named, f"--lora-dir={folder}", "--allow-lora-rpc", "--num-blocks=256", "--threads=1")
    logs = tmp_path_factory.mktemp("logs")
    async with running_fleet(hist_folder, logs, 2, engine_flags=(*flags, "--served-model-name=hist")) as made:
        yield made


@asynccontextmanager
async def sdk(fleet: Fleet) -> AsyncIterator[AsyncOpenAI]:
    url = f"http://127.0.0.1:{await fleet.tokenizer.port('http_port')}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as client:
        yield client


async def complete(client: AsyncOpenAI, model: str) -> list[int]:
    options = GREEDY | {"extra_body": {"ignore_eos": True, "return_token_ids": True}}
    answer = await client.completions.create(model=model, prompt=PROMPT, **options)
    assert answer.model == model
    choice: Any = answer.choices[0]
    return list(choice.token_ids)


async def models_of(client: AsyncOpenAI) -> dict[str, str | None]:
    """Id -> parent."""
    return {each.id: getattr(each, "parent", None) async for each in client.models.list()}


@asynccontextmanager
async def stub_of(engine: FleetEngine) -> AsyncIterator["engine_pb2_grpc.EngineServiceAsyncStub"]:
    async with grpc.aio.insecure_channel(engine.address) as channel:
        yield engine_pb2_grpc.EngineServiceStub(channel)


async def steps_of(engine: FleetEngine) -> int:
    return (await engine.load()).generated_tokens_total


async def test_adapters_are_models(fleet: Fleet, reference: PeftReference) -> None:
    async with sdk(fleet) as client:
        models = await models_of(client)
        (base,) = [name for name, parent in models.items() if parent is None]
        assert models == {base: None, "red": base, "green": base}
        assert (await client.models.retrieve("red")).id == "red"
        asked = [base, "red", "green"] * 4
        answers = await asyncio.gather(*(complete(client, name) for name in asked))
        assert answers == [reference.greedy("" if name == base else name, PROMPT, COUNT) for name in asked]
        chat = await client.chat.completions.create(
            model="green", messages=[{"role": "user", "content": "hi"}], **GREEDY
        )
        assert chat.model == "green"
        for call in (complete(client, "nobody"), client.models.retrieve("nobody")):
            with pytest.raises(NotFoundError, match="nobody"):
                await call


async def test_the_grpc_client_names_them_too(fleet: Fleet, reference: PeftReference) -> None:
    async with AsyncClient(fleet.target) as client:
        listed = {model.name: model.parent for model in await client.models()}
        assert {name for name, parent in listed.items() if parent} == {"red", "green"}
        sampling = Sampling(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
        result = await client.generate(PROMPT, sampling, model="red").result()
        assert list(result.token_ids) == reference.greedy("red", PROMPT, COUNT)


async def test_requests_go_where_their_adapter_is(fleet: Fleet, reference: PeftReference) -> None:
    """Loaded at run time in one engine of two: known to clients, sent there alone, gone when it is unloaded."""
    first, second = fleet.engines
    async with sdk(fleet) as client, stub_of(first) as stub:
        loaded = (await stub.LoadAdapter(engine_pb2.LoadAdapterRequest(name="blue"))).adapter
        assert loaded.in_memory

        async def is_listed() -> bool:
            return "blue" in await models_of(client)

        await until(is_listed, 5.0)
        before = await steps_of(second)
        answers = await asyncio.gather(*(complete(client, "blue") for _ in range(8)))
        assert answers == [reference.greedy("blue", PROMPT, COUNT)] * 8
        assert await steps_of(second) == before
        await stub.UnloadAdapter(engine_pb2.UnloadAdapterRequest(name="blue"))

        async def is_gone() -> bool:
            return "blue" not in await models_of(client)

        await until(is_gone, 5.0)
        with pytest.raises(NotFoundError):
            await complete(client, "blue")


async def test_another_engine_with_the_adapter_goes_on(fleet: Fleet, reference: PeftReference) -> None:
    """Both engines have a request with the adapter; one of them is killed in the middle."""
    count = 600
    wanted = reference.greedy("red", PROMPT, count)
    async with AsyncClient(fleet.target) as client:
        sampling = Sampling(temperature=0.0, max_tokens=count, ignore_eos=True)
        streams = [client.generate(PROMPT, sampling, model="red") for _ in range(4)]
        begun = asyncio.Event()

        async def read(stream: Any) -> list[int]:
            tokens: list[int] = []
            async for delta in stream:
                tokens.extend(delta.token_ids)
                begun.set()
            return tokens

        readers = [asyncio.create_task(read(stream)) for stream in streams]
        await begun.wait()
        await fleet.engines[0].kill()
        assert await asyncio.gather(*readers) == [wanted] * 4
    assert await fleet.failovers("lost") >= 1
