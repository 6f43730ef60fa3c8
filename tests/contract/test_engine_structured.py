"""Structured output over gRPC on the real engine process: every kind, bad ones, and hostile ones among streams."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from engine_service.core.sampling import ConstraintKind
from service_runtime.grpc_server import channel_options
from tests.fixtures.checkpoints import HIST_EOS, write_hist
from tests.fixtures.engine_process import EngineProcess, started_engine
from tests.fixtures.grammars import as_json, schema_of, text_of
from tests.fixtures.hostile_grammars import HARMLESS, REFUSED
from tokenwire.common.v1 import outcome_pb2, sampling_pb2
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

grpc.aio.init_grpc_aio()

Stub = Any
KINDS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": as_json(schema_of(0))},
    "regex": {"regex": "[0-9]{3}(a|é)"},
    "grammar": {"grammar": 'root ::= "x" [0-9] "y"'},
    "choice": {"choice": sampling_pb2.Choices(values=["ja", "nein", "삼"])},
}


@pytest.fixture(scope="module")
def hist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("checkpoints") / "hist")


@pytest.fixture(scope="module")
def engine(hist: Path) -> Iterator[EngineProcess]:
    with started_engine(hist, "--num-blocks=512", "--block-size=16", "--max-num-requests=16") as engine:
        yield engine
        assert engine.process.poll() is None


@asynccontextmanager
async def connect(engine: EngineProcess) -> AsyncIterator[Stub]:
    async with grpc.aio.insecure_channel(engine.address, options=channel_options()) as channel:
        yield engine_pb2_grpc.EngineServiceStub(channel)


def request(prompt: list[int], constraint: dict[str, Any] | None = None, **fields: Any) -> engine_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(**{"max_tokens": 200, "seed": 5, "temperature": 1.0, **fields})
    if constraint is not None:
        sampling.structured_output.CopyFrom(sampling_pb2.StructuredOutput(**constraint))
    return engine_pb2.GenerateRequest(request=engine_pb2.TokenRequest(prompt_token_ids=prompt, sampling=sampling))


async def tokens_of(stub: Stub, message: engine_pb2.GenerateRequest) -> tuple[list[int], engine_pb2.Finish]:
    tokens: list[int] = []
    async with asyncio.timeout(90):
        async for response in stub.Generate(message):
            tokens += response.token_ids
            finish = response.finish
    return tokens, finish


async def refusal(stub: Stub, message: engine_pb2.GenerateRequest) -> tuple[grpc.StatusCode, str, list[str]]:
    """Status, message and the fields that it names."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await tokens_of(stub, message)
    status = rpc_status.from_call(caught.value)
    fields = []
    for detail in status.details if status is not None else ():
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            fields += [violation.field for violation in bad.field_violations]
    return caught.value.code(), caught.value.details() or "", fields


def constraint_of(kind: ConstraintKind, text: str) -> dict[str, Any]:
    return {kind.value: text}


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_is_kept(engine: EngineProcess, hist: Path, kind: str) -> None:
    async with connect(engine) as stub:
        results = await asyncio.gather(*(tokens_of(stub, request([7, 8, 9 + i], KINDS[kind])) for i in range(6)))
    for tokens, finish in results:
        assert finish.reason == outcome_pb2.FINISH_REASON_STOP
        assert tokens[-1] == HIST_EOS
        text = text_of(hist, tokens[:-1])
        match kind:
            case "json_schema":
                jsonschema.validate(json.loads(text), schema_of(0))
            case "choice":
                assert text in ("ja", "nein", "삼")
            case _:
                assert re.fullmatch("[0-9]{3}(a|é)" if kind == "regex" else "x[0-9]y", text)


async def test_samples_differ_by_seed_and_equal_requests_with_theirs(engine: EngineProcess) -> None:
    async with connect(engine) as stub:
        single = [(await tokens_of(stub, request([4, 4], KINDS["regex"], seed=5 + i)))[0] for i in range(4)]
        by_sample: dict[int, list[int]] = {}
        async for response in stub.Generate(request([4, 4], KINDS["regex"], n=4)):
            by_sample.setdefault(response.index, []).extend(response.token_ids)
    assert [by_sample[i] for i in range(4)] == single


async def test_bad_constraints_name_their_field(engine: EngineProcess) -> None:
    async with connect(engine) as stub:
        for name, (kind, text, words) in REFUSED.items():
            code, message, fields = await refusal(stub, request([5], constraint_of(kind, text)))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, (name, message)
            assert words in message
            assert fields == [f"request.sampling.structured_output.{kind.value}"], name


async def test_streams_go_on_exactly_while_hostile_constraints_come(engine: EngineProcess) -> None:
    """Eight free streams have the tokens they have alone, and no pause between two of them is long."""
    prompts = [[20 + i, 30, 40 + i] for i in range(8)]
    free = [
        request(prompt, max_tokens=1200, ignore_eos=True, temperature=0.8, seed=i) for i, prompt in enumerate(prompts)
    ]
    async with connect(engine) as stub:
        alone = await asyncio.gather(*(tokens_of(stub, message) for message in free))
        streams = [asyncio.create_task(tokens_of(stub, message)) for message in free]
        hostile = [request([9], constraint_of(kind, text), max_tokens=40) for kind, text, _ in REFUSED.values()]
        hostile += [request([9], constraint_of(kind, text), max_tokens=40) for kind, text in HARMLESS.values()]
        outcomes = await asyncio.gather(*(tokens_of(stub, message) for message in hostile), return_exceptions=True)
        assert [tokens for tokens, _ in await asyncio.gather(*streams)] == [tokens for tokens, _ in alone]
        load = await stub.GetLoad(engine_pb2.GetLoadRequest())
    codes = [error.code() for error in outcomes if isinstance(error, grpc.aio.AioRpcError)]
    assert set(codes) <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
    assert len(codes) >= len(REFUSED)
    assert (load.running_requests, load.waiting_requests, load.used_blocks) == (0, 0, 0)


async def test_a_client_that_leaves_while_its_grammar_is_checked_leaves_nothing(engine: EngineProcess) -> None:
    slow = {"json_schema": '{"type": "integer", "multipleOf": 999979}'}
    async with connect(engine) as stub:
        call = stub.Generate(request([9], slow))
        waiter = asyncio.create_task(call.read())
        await asyncio.wait({waiter}, timeout=0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        code, _, _ = await refusal(stub, request([9], slow))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        tokens, _ = await tokens_of(stub, request([7], KINDS["choice"]))
        assert tokens[-1] == HIST_EOS


async def test_ignore_eos_is_refused(engine: EngineProcess) -> None:
    async with connect(engine) as stub:
        code, message, fields = await refusal(stub, request([5], KINDS["regex"], ignore_eos=True))
    assert (code, fields) == (grpc.StatusCode.INVALID_ARGUMENT, ["request.sampling.ignore_eos"])
    assert "structured_output" in message
