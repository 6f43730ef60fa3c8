"""Adapters by an operator's word: on all engines at once, over real sockets; each engine answers for itself."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.adapters import FOUR, PeftReference, write_adapter
from tests.fixtures.checkpoints import HIST_VOCAB, write_hist
from tests.fixtures.http_calls import COMPLETIONS
from tests.fixtures.lora_fleet import LoraFleet, lora_fleet
from tests.fixtures.tokenizer_app import default_model, model_info, running
from tokenwire.engine.v1 import engine_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire.tokenizer.v1 import tokenizer_pb2_grpc
from tokenwire_client.errors import ErrorCode, InvalidRequest, Unavailable
from tokenwire_client.operator import Operator
from tokenwire_client.operator_adapters import EngineOutcome

PROMPT = [number * 7 % HIST_VOCAB for number in range(1, 40)]
COUNT = 16
BAD_NAMES = ["", "..", "../red", "/etc", "a/b", "-red", "red\0", "x" * 129, "x" * 5000]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("checkpoints") / "hist")


@pytest.fixture(scope="module")
def folder(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`red` has rank 4, `wide` rank 16."""
    place = tmp_path_factory.mktemp("adapters")
    for seed, (name, shape) in enumerate(zip(("red", "wide"), FOUR, strict=False), 1):
        write_adapter(place / name, model, shape, seed)
    return place


@pytest.fixture(scope="module")
def fleet(model: Path, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoraFleet]:
    with lora_fleet(model, folder, tmp_path_factory.mktemp("logs") / "tokenizer.log") as made:
        yield made


def complete(fleet: LoraFleet, name: str) -> httpx.Response:
    body = {"model": name, "prompt": PROMPT, "temperature": 0, "max_tokens": COUNT, "ignore_eos": True}
    return fleet.http.post(COMPLETIONS, json=body | {"return_token_ids": True})


def errors_of(outcomes: tuple[EngineOutcome, ...]) -> list[ErrorCode | None]:
    return [each.error for each in outcomes]


def states_of(fleet: LoraFleet, operator: Operator, name: str) -> list[bool | None]:
    """By engine: in memory, only known (False), or not at all (None)."""
    engines = operator.adapters()
    assert tuple(each.address for each in engines) == fleet.addresses
    found = [{adapter.name: adapter.in_memory for adapter in engine.adapters} for engine in engines]
    return [names.get(name) for names in found]


def test_a_loaded_adapter_is_used_at_once_and_gone_when_unloaded(fleet: LoraFleet, model: Path, folder: Path) -> None:
    """Without a pause: what the call has answered, requests can rely on."""
    wanted = PeftReference(model, {"red": folder / "red"}).greedy("red", PROMPT, COUNT)
    with fleet.operator() as operator:
        assert complete(fleet, "red").status_code == 404
        for _ in range(3):
            loaded = operator.load_adapter("red")
            assert tuple(each.address for each in loaded) == fleet.addresses
            assert errors_of(loaded) == [None, None, ErrorCode.PERMISSION_DENIED]
            assert "without --allow-lora-rpc" in loaded[2].message
            assert states_of(fleet, operator, "red") == [True, True, None]
            assert complete(fleet, "red").json()["choices"][0]["token_ids"] == wanted
            assert "red" in [each["id"] for each in fleet.http.get("/v1/models").json()["data"]]
            assert errors_of(operator.unload_adapter("red")) == [None, None, ErrorCode.PERMISSION_DENIED]
            assert states_of(fleet, operator, "red") == [None, None, None]
            assert complete(fleet, "red").status_code == 404


def test_each_engine_has_its_own_reasons(fleet: LoraFleet, folder: Path) -> None:
    with fleet.operator() as operator:
        loaded = operator.load_adapter("wide")
        assert errors_of(loaded) == [None, ErrorCode.INVALID_ARGUMENT, ErrorCode.PERMISSION_DENIED]
        assert "16" in loaded[1].message
        assert "8" in loaded[1].message
        assert complete(fleet, "wide").status_code == 200
        unloaded = operator.unload_adapter("wide")
        assert errors_of(unloaded) == [None, ErrorCode.NOT_FOUND, ErrorCode.PERMISSION_DENIED]
        missing = operator.load_adapter("missing")
        assert errors_of(missing) == [ErrorCode.INVALID_ARGUMENT] * 2 + [ErrorCode.PERMISSION_DENIED]
        assert not any(str(folder) in each.message for each in (*loaded, *unloaded, *missing))


def test_one_that_is_silent_hides_no_other(fleet: LoraFleet) -> None:
    os.kill(fleet.narrow.pid, signal.SIGSTOP)
    try:
        with fleet.operator(timeout=2.0) as operator:
            loaded = operator.load_adapter("red")
    finally:
        os.kill(fleet.narrow.pid, signal.SIGCONT)
    assert errors_of(loaded) == [None, ErrorCode.DEADLINE_EXCEEDED, ErrorCode.PERMISSION_DENIED]
    assert "no answer within 1.8 s" in loaded[1].message
    with fleet.operator() as operator:
        operator.load_adapter("red")
        assert errors_of(operator.unload_adapter("red"))[:2] == [None, None]


@pytest.mark.parametrize("name", [*BAD_NAMES, "hist"])
def test_what_can_be_no_name_reaches_no_engine(fleet: LoraFleet, name: str) -> None:
    with fleet.operator() as operator:
        for call in (operator.load_adapter, operator.unload_adapter):
            with pytest.raises(InvalidRequest) as refused:
                call(name)
            assert [each.field for each in refused.value.field_violations] == ["name"]
            assert len(refused.value.message) < 400


def test_the_command_shows_each_engine_and_says_when_one_refused(fleet: LoraFleet) -> None:
    free, narrow, closed = fleet.addresses
    heads = "adapter\tengine\tstate\tfingerprint\n"
    assert fleet.command("list") == (0, heads, "")
    code, out, err = fleet.command("load", "wide")
    lines = [line.split("\t") for line in out.splitlines()]
    assert (code, err) == (1, "")
    assert [line[:2] for line in lines] == [
        ["engine", "outcome"],
        [free, "ok"],
        [narrow, "invalid_argument"],
        [closed, "permission_denied"],
    ]
    code, out, _ = fleet.command("list")
    rows = [line.split("\t") for line in out.splitlines()[1:]]
    assert [row[:3] for row in rows] == [
        ["wide", free, "in memory"],
        ["wide", narrow, "missing"],
        ["wide", closed, "missing"],
    ]
    assert [len(row[3]) for row in rows] == [12, 0, 0]
    code, out, _ = fleet.command("list", "--json")
    assert [[adapter["name"] for adapter in engine["adapters"]] for engine in json.loads(out)] == [["wide"], [], []]
    code, out, _ = fleet.command("unload", "wide", "--json")
    assert (code, [each["error"] for each in json.loads(out)]) == (1, [None, "not_found", "permission_denied"])
    code, out, err = fleet.command("load", "../wide")
    assert (code, out) == (2, "")
    assert "invalid argument: name: a name has 1 to 128" in err


async def test_without_an_engine_it_is_unavailable_and_strange_ones_answer_for_themselves() -> None:
    """An engine that is not connected is listed; one that knows no adapters has its own code."""
    async with running(default_model(), fe.until_cancelled, operator_port=0) as service:
        target = f"127.0.0.1:{service.app.operator_port}"
        await asyncio.to_thread(ask_without_engines, target)


def ask_without_engines(target: str) -> None:
    with Operator(target) as operator:
        (outcome,) = operator.load_adapter("red")
        assert outcome.error is ErrorCode.UNIMPLEMENTED
        operator.remove_engine(outcome.address)
        operator.add_engine("127.0.0.1:1")
        for call in (operator.load_adapter, operator.unload_adapter):
            with pytest.raises(Unavailable, match="no engine is connected"):
                call("red")
        assert [(each.state, each.adapters) for each in operator.adapters()][-1:] == [("connecting", ())]


class SlowToTell(fe.FakeEngine):
    """Says that it has loaded an adapter; its session hears of it when the test wants."""

    def __init__(self) -> None:
        super().__init__(model_info(default_model()), fe.until_cancelled)
        self.asked = asyncio.Event()

    async def LoadAdapter(self, request: Any, context: Any) -> engine_pb2.LoadAdapterResponse:
        self.asked.set()
        return engine_pb2.LoadAdapterResponse(adapter=engine_pb2.LoraAdapter(name=request.name, fingerprint="new"))

    async def tell(self, fingerprint: str) -> None:
        adapters = engine_pb2.LoraAdapters(adapters=[engine_pb2.LoraAdapter(name="red", fingerprint=fingerprint)])
        await self.sessions[0].context.write(engine_pb2.SessionResponse(adapters=adapters))


@pytest.mark.parametrize("is_lost", [False, True])
async def test_the_answer_comes_when_requests_can_rely_on_it(is_lost: bool) -> None:
    """Not before the session, by whose word requests are routed, has told of the adapter, or has ended."""
    engine = SlowToTell()
    await engine.start()
    try:
        async with (
            running(default_model(), fe.until_cancelled, engine=(engine.address,), operator_port=0) as service,
            grpc.aio.insecure_channel(f"127.0.0.1:{service.app.operator_port}") as channel,
        ):
            stub = tokenizer_pb2_grpc.OperatorServiceStub(channel)
            call = asyncio.create_task(load_red(stub))
            await engine.asked.wait()
            await engine.tell("old")
            for _ in range(20):
                await stub.ListEngines(pb.ListEnginesRequest())
            assert not call.done()
            await (engine.break_sessions() if is_lost else engine.tell("new"))
            await call
            assert is_lost or service.app.fleet.router.adapters() == {"red": "new"}
    finally:
        await engine.stop()


async def load_red(stub: "tokenizer_pb2_grpc.OperatorServiceAsyncStub") -> None:
    (outcome,) = (await stub.LoadAdapter(pb.LoadAdapterRequest(name="red"))).engines
    assert not outcome.HasField("error")
