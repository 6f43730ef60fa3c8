"""Which engines a request with an adapter may go to, and what happens when one has just lost it; scripted engines."""

from typing import Any

import grpc
import pytest

from engine_service.core.adapter_salt import salt_with_adapter
from engine_service.core.prefix_index import PrefixIndex
from tests.fixtures import fake_engine as fe
from tests.fixtures.tokenizer_app import collect, default_model, eventually, failure, ids_request, model_info, running
from tokenizer_service.engines.block_digests import block_digests, salt_of
from tokenwire.common.v1 import outcome_pb2
from tokenwire.engine.v1 import engine_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

GONE = outcome_pb2.RequestError(grpc_code=grpc.StatusCode.NOT_FOUND.value[0], message="there is no adapter 'red'")


def info(fingerprint: str, in_memory: bool = True) -> engine_pb2.GetModelInfoResponse:
    adapter = engine_pb2.LoraAdapter(name="red", fingerprint=fingerprint, rank=4, in_memory=in_memory)
    return model_info(default_model(), adapters=[adapter] if fingerprint else [])


def request_of(model: str) -> pb.GenerateRequest:
    request = ids_request([5, 6], sampling={"max_tokens": 2})
    request.model = model
    return request


async def answers(request: fe.FakeRequest) -> None:
    await request.play([13874, 19556])


async def refuses(request: fe.FakeRequest) -> None:
    await request.send([], request.finish(fe.ERROR, error=GONE))


async def test_only_engines_with_that_content_are_asked() -> None:
    infos = [info(""), info("aa"), info("bb"), info("aa")]
    async with running(default_model(), answers, infos=infos) as service:
        await eventually(lambda: service.app.fleet.router.num_connected == len(infos))
        for _ in range(6):
            await collect(service.stub.Generate(request_of("red")))
        wanted = service.app.fleet.router.adapters()["red"]
        asked = [len(engine.requests) for engine in service.engines]
        has_it = [wanted in [each.fingerprint for each in one.adapters] for one in infos]
        assert sum(asked) == 6
        assert not any(count for count, may in zip(asked, has_it, strict=True) if not may)
        (first, *_) = [request for engine in service.engines for request in engine.requests]
        assert (first.message.adapter, first.message.adapter_fingerprint) == ("red", wanted)


async def test_one_in_memory_is_preferred() -> None:
    infos = [info("aa", in_memory=False), info("aa"), info("aa", in_memory=False)]
    async with running(default_model(), answers, infos=infos) as service:
        await eventually(lambda: service.app.fleet.router.num_connected == len(infos))
        for _ in range(4):
            await collect(service.stub.Generate(request_of("red")))
        assert [len(engine.requests) for engine in service.engines] == [0, 4, 0]


@pytest.mark.parametrize("num_refusing", [1, 2])
async def test_another_engine_is_asked_when_one_has_lost_it(num_refusing: int) -> None:
    refused: list[fe.FakeRequest] = []

    async def script(request: fe.FakeRequest) -> None:
        if len(refused) < num_refusing:
            refused.append(request)
            await refuses(request)
        else:
            await answers(request)

    settings: dict[str, Any] = {"failover_wait": 30.0, "failover_attempts": 1}
    async with running(default_model(), script, infos=[info("aa"), info("aa")], **settings) as service:
        await eventually(lambda: service.app.fleet.router.num_connected == 2)
        if num_refusing == 1:
            assert (await collect(service.stub.Generate(request_of("red")))).token_ids == [13874, 19556]
            assert [len(engine.requests) for engine in service.engines] == [1, 1]
        else:
            error = await failure(service.stub.Generate(request_of("red")))
            assert error.code() is grpc.StatusCode.NOT_FOUND
            assert "'red'" in (error.details() or "")


async def test_an_unknown_name_reaches_no_engine() -> None:
    async with running(default_model(), answers, infos=[info("aa")]) as service:
        error = await failure(service.stub.Generate(request_of("green")))
        assert error.code() is grpc.StatusCode.NOT_FOUND
        assert not service.engines[0].requests


@pytest.mark.parametrize("salt", ["", "tenant"])
def test_blocks_have_the_names_that_engines_give_them(salt: str) -> None:
    """B048: and no salt of a client gives the same."""
    tokens = list(range(9))
    keys: list[bytes] = []
    PrefixIndex(4).match(tokens, salt_with_adapter(salt, "aa"), keys, 2)
    index = PrefixIndex(4)
    parent = index.publish(tokens, salt_with_adapter(salt, "aa"), keys, 0, None, 0)
    index.publish(tokens, salt_with_adapter(salt, "aa"), keys, 1, parent, 1)
    ours = block_digests(tokens, 4, salt_of(salt or None, "aa"))
    assert [key[:16] for key in keys] == ours
    others = [salt_of(salt, ""), salt_of(salt, "ab"), salt_of(f"aa{salt}", ""), salt_of("", f"aa{salt}x")]
    assert all(block_digests(tokens, 4, other)[0] != ours[0] for other in others)
    assert index.match(tokens, salt, [], 2) == []
