"""LoRA adapters of a real engine process: named by requests, loaded and unloaded while it runs, bounded in memory."""

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import httpx
import pytest

from tests.fixtures.adapters import FOUR, PeftReference, write_adapter
from tests.fixtures.checkpoints import HIST_VOCAB, write_hist
from tests.fixtures.engine_process import EngineProcess, started_engine
from tests.fixtures.scripted_engine import scripted_service
from tokenwire.common.v1 import sampling_pb2
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

COUNT = 12
PROMPT = [number * 7 % HIST_VOCAB for number in range(1, 50)]
NAMES = ("red", "green", "blue", "grey")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"))


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of run-time adapters, by name."""
    place = tmp_path_factory.mktemp("adapters")
    for seed, (name, shape) in enumerate(zip(NAMES, FOUR, strict=True), 1):
        write_adapter(place / name, model, shape, seed)
    return place


@pytest.fixture(scope="module")
def wanted(model: Path, folder: Path) -> dict[str, list[int]]:
    reference = PeftReference(model, {name: folder / name for name in NAMES})
    return {name: reference.greedy(name, PROMPT, COUNT) for name in ("", *NAMES)}


@pytest.fixture(scope="module")
def engine(model: Path, folder: Path) -> Iterator[EngineProcess]:
    flags = (f"--lora=red={folder / 'red'}", f"--lora-dir={folder}", "--max-loras=2", "--allow-lora-rpc")
    with started_engine(model, "--num-blocks=128", *flags) as started:
        yield started


@asynccontextmanager
async def connected(engine: EngineProcess) -> AsyncIterator["engine_pb2_grpc.EngineServiceAsyncStub"]:
    async with grpc.aio.insecure_channel(engine.address) as channel:
        yield engine_pb2_grpc.EngineServiceStub(channel)


def request_of(adapter: str, count: int = COUNT, fingerprint: str = "") -> engine_pb2.TokenRequest:
    return engine_pb2.TokenRequest(
        prompt_token_ids=PROMPT,
        sampling=sampling_pb2.SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True),
        adapter=adapter,
        adapter_fingerprint=fingerprint,
    )


async def generate(
    stub: "engine_pb2_grpc.EngineServiceAsyncStub", adapter: str, count: int = COUNT, fingerprint: str = ""
) -> list[int]:
    tokens: list[int] = []
    request = engine_pb2.GenerateRequest(request=request_of(adapter, count, fingerprint))
    async for message in stub.Generate(request):
        tokens.extend(message.token_ids)
    return tokens


async def names_of(stub: "engine_pb2_grpc.EngineServiceAsyncStub") -> dict[str, bool]:
    info = await stub.GetModelInfo(engine_pb2.GetModelInfoRequest())
    return {adapter.name: adapter.in_memory for adapter in info.adapters}


async def load(stub: "engine_pb2_grpc.EngineServiceAsyncStub", name: str) -> engine_pb2.LoraAdapter:
    return (await stub.LoadAdapter(engine_pb2.LoadAdapterRequest(name=name))).adapter


async def unload(stub: "engine_pb2_grpc.EngineServiceAsyncStub", name: str) -> None:
    await stub.UnloadAdapter(engine_pb2.UnloadAdapterRequest(name=name))


def metric(engine: EngineProcess, name: str) -> float:
    lines = httpx.get(engine.metrics_url).text.splitlines()
    return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(name)))


async def test_more_adapters_than_places_at_once(engine: EngineProcess, wanted: dict[str, list[int]]) -> None:
    """Four adapters and the model itself, in one batch as far as two places allow; the others wait their turn."""
    async with connected(engine) as stub:
        for name in NAMES[1:]:
            assert (await load(stub, name)).name == name
        asked = ["", *NAMES] * 4
        answers = await asyncio.gather(*(generate(stub, name) for name in asked))
        assert answers == [wanted[name] for name in asked]
        known = await names_of(stub)
        assert set(known) == set(NAMES)
        assert sum(known.values()) == 2
        assert metric(engine, 'tokenwire_engine_lora_adapters{state="resident"}') == 2
        assert metric(engine, 'tokenwire_engine_lora_adapters{state="known"}') == len(NAMES)
        assert metric(engine, "tokenwire_engine_lora_evictions_total") >= 2
        for name in NAMES[1:]:
            await unload(stub, name)
        assert set(await names_of(stub)) == {"red"}


async def test_unknown_names_are_refused(engine: EngineProcess) -> None:
    async with connected(engine) as stub:
        for adapter, fingerprint, words in (("nobody", "", "'nobody'"), ("red", "ff", "another content")):
            with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
                await generate(stub, adapter, fingerprint=fingerprint)
            assert refused.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await unload(stub, "nobody")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("name", ["", "..", ".", "../red", "/etc", "a/b", "red\0", "x" * 129, "-red", "link"])
async def test_no_name_leads_out_of_the_folder(engine: EngineProcess, folder: Path, name: str, tmp_path: Path) -> None:
    link = folder / "link"
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path)
    async with connected(engine) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await load(stub, name)
    link.unlink()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert str(folder) not in (refused.value.details() or "")


async def test_a_bad_folder_is_refused_with_the_field(engine: EngineProcess, folder: Path) -> None:
    shutil.copytree(folder / "red", folder / "bad", dirs_exist_ok=True)
    config = folder / "bad" / "adapter_config.json"
    config.write_text(config.read_text().replace('"use_dora": false', '"use_dora": true'))
    async with connected(engine) as stub:
        for name, words in (("bad", "use_dora is true"), ("missing", "adapter_config.json cannot be read")):
            with pytest.raises(grpc.aio.AioRpcError, match=words) as refused:
                await load(stub, name)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert str(folder) not in (refused.value.details() or "")
        assert "bad" not in await names_of(stub)


async def test_running_requests_keep_what_was_unloaded(
    engine: EngineProcess, folder: Path, wanted: dict[str, list[int]]
) -> None:
    """The name then means something else: neither the running request nor the cache takes any notice."""
    shutil.copytree(folder / "green", folder / "same", dirs_exist_ok=True)
    long = 400
    async with connected(engine) as stub:
        first = await load(stub, "same")
        call = stub.Generate(engine_pb2.GenerateRequest(request=request_of("same", long)))
        tokens = list((await anext(aiter(call))).token_ids)
        shutil.rmtree(folder / "same")
        shutil.copytree(folder / "blue", folder / "same")
        second = await load(stub, "same")
        assert second.fingerprint != first.fingerprint
        assert await generate(stub, "same") == wanted["blue"]
        async for message in call:
            tokens.extend(message.token_ids)
        assert tokens[:COUNT] == wanted["green"]
        assert len(tokens) == long
        await load(stub, "green")
        assert await generate(stub, "green", long) == tokens
        for name in ("same", "green"):
            await unload(stub, name)


async def test_a_session_is_told_when_adapters_change(engine: EngineProcess) -> None:
    async with connected(engine) as stub:
        session = stub.Session()
        await session.write(engine_pb2.SessionRequest(open=engine_pb2.OpenSession()))
        opened = await session.read()
        assert isinstance(opened, engine_pb2.SessionResponse)
        assert [adapter.name for adapter in opened.opened.model.adapters] == ["red"]
        await load(stub, "grey")
        told = await session.read()
        assert isinstance(told, engine_pb2.SessionResponse)
        assert [adapter.name for adapter in told.adapters.adapters] == ["red", "grey"]
        session.cancel()
        await unload(stub, "grey")


async def test_without_permission_nothing_changes() -> None:
    async with scripted_service() as engine:
        stub = engine.stub
        for call in (load, unload):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(stub, "red")
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
        with pytest.raises(grpc.aio.AioRpcError, match="serves no adapters") as refused:
            await generate(stub, "red")
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


def test_a_start_with_a_bad_adapter_says_which(model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "engine_service", f"--model={model}", "--port=0", "--metrics-port=0"]
    ended = subprocess.run([*command, f"--lora=mine={tmp_path}"], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "--lora mine: adapter_config.json cannot be read" in ended.stderr
