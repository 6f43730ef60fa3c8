"""A client's mistake is INVALID_ARGUMENT (or RESOURCE_EXHAUSTED for size) with the field and the numbers."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
import pytest_asyncio

from tests.fixtures.stack import Stack
from tests.integration.probes import FOREVER, assert_alive, forever, forever_ids
from tokenwire.common.v1.sampling_pb2 import SamplingParams
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire.tokenizer.v1 import tokenizer_pb2_grpc
from tokenwire_client import AsyncClient
from tokenwire_client.rpc_errors import translate

pytestmark = pytest.mark.asyncio(loop_scope="module")

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def generate(text: str = "Hello", **fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=text, **fields)


def sampled(**fields: Any) -> pb.GenerateRequest:
    return generate(options=pb.GenerationOptions(sampling=SamplingParams(**fields)))


def ids(*values: int) -> pb.GenerateRequest:
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=values))


def stops(*values: str) -> pb.GenerateRequest:
    return generate(options=pb.GenerationOptions(stop=values))


# (what is sent, what it is refused with, the field it names, words of the message)
TABLE: list[tuple[str, pb.GenerateRequest, grpc.StatusCode, str, tuple[str, ...]]] = [
    ("prompt of 8,193 tokens", ids(*[5] * 8193), INVALID, "token_ids", ("8,193", "8,192")),
    ("prompt of 8,192 tokens", ids(*[5] * 8192), INVALID, "token_ids", ("8,192",)),
    ("id out of the vocabulary", ids(5, 49_152), INVALID, "token_ids.ids[1]", ("49152", "49151")),
    ("id out of int32", ids(2**32 - 1), INVALID, "token_ids.ids[0]", ("4294967295",)),
    ("5 MiB prompt", generate("a" * (5 << 20)), EXHAUSTED, "", ()),
    ("text that can never fit", generate("word " * 200_000), INVALID, "text", ("8,192",)),
    ("empty text", generate(""), INVALID, "text", ()),
    ("empty ids", ids(), INVALID, "token_ids", ()),
    ("no prompt at all", pb.GenerateRequest(), INVALID, "prompt", ()),
    ("temperature NaN", sampled(temperature=math.nan), INVALID, "temperature", ("nan",)),
    ("temperature inf", sampled(temperature=math.inf), INVALID, "temperature", ("inf",)),
    ("temperature -1", sampled(temperature=-1), INVALID, "temperature", ("-1",)),
    ("top_p 0", sampled(top_p=0), INVALID, "top_p", ("0",)),
    ("top_p NaN", sampled(top_p=math.nan), INVALID, "top_p", ("nan",)),
    ("top_p 1.1", sampled(top_p=1.1), INVALID, "top_p", ("1.1",)),
    ("min_p -0.1", sampled(min_p=-0.1), INVALID, "min_p", ("-0.1",)),
    ("min_p 1.5", sampled(min_p=1.5), INVALID, "min_p", ("1.5",)),
    ("top_k -2", sampled(top_k=-2), INVALID, "top_k", ("-2",)),
    ("max_tokens 0", sampled(max_tokens=0), INVALID, "max_tokens", ("0",)),
    ("max_tokens -5", sampled(max_tokens=-5), INVALID, "max_tokens", ("-5",)),
    ("min_tokens -1", sampled(min_tokens=-1), INVALID, "min_tokens", ("-1",)),
    ("B027 min over max", sampled(min_tokens=10, max_tokens=5), INVALID, "min_tokens", ("10", "5")),
    (
        "stop id out of the vocabulary",
        sampled(stop_token_ids=[49_152]),
        INVALID,
        "stop_token_ids",
        ("49152",),
    ),
    ("negative stop id", sampled(stop_token_ids=[-1]), INVALID, "stop_token_ids", ("-1",)),
    ("too many stop ids", sampled(stop_token_ids=[7] * 257), INVALID, "stop_token_ids", ("257", "256")),
    ("B021 empty stop", stops(""), INVALID, "stop", ()),
    ("B021 one empty stop", stops("x", ""), INVALID, "stop", ("1",)),
    ("B021 5,000 stops", stops(*["x"] * 5000), INVALID, "stop", ("5,000", "64")),
    ("B021 a huge stop", stops("x" * 100_000), INVALID, "stop", ("100,000", "1,024")),
    ("long request id", generate(request_id="x" * 257), INVALID, "request_id", ("257", "256")),
    (
        "long cache salt",
        generate(options=pb.GenerationOptions(cache_salt="x" * 10_240)),
        INVALID,
        "cache_salt",
        ("10,240", "256"),
    ),
    ("another model", generate(model="gpt-5"), grpc.StatusCode.NOT_FOUND, "", ("gpt-5",)),
]


@pytest_asyncio.fixture(loop_scope="module")
async def client(succ_stack: Stack) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(succ_stack.target) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="module")
async def eight_streams(succ_stack: Stack) -> AsyncIterator[None]:
    """Eight good streams that run during the test and must come out exact."""
    async with AsyncClient(succ_stack.target) as client:
        tasks = [asyncio.create_task(client.generate(FOREVER, forever(400)).result()) for _ in range(8)]
        yield
        for completion in await asyncio.gather(*tasks):
            assert completion.token_ids == forever_ids(400)
    await succ_stack.until_idle()


async def refused(call: Callable[[], Any]) -> Any:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        async for _ in call():
            pass
    return error.value


async def test_every_mistake_is_named_while_eight_streams_go_on(succ_stack: Stack, eight_streams: None) -> None:
    pids = (succ_stack.engine.pid, succ_stack.tokenizer.pid, (await succ_stack.load()).engine_pid)
    options = [("grpc.max_send_message_length", 64 << 20)]
    async with grpc.aio.insecure_channel(succ_stack.target, options=options) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        for name, request, code, field, words in TABLE:
            error = await refused(lambda request=request: stub.Generate(request))
            failure = translate(error.code(), error.details(), error.trailing_metadata())
            assert error.code() is code, f"{name}: {error.code()} {error.details()}"
            said = f"{error.details()} " + " ".join(f"{v.field} {v.description}" for v in failure.field_violations)
            assert field in " ".join(v.field for v in failure.field_violations) or code is not INVALID, (
                f"{name}: {said}"
            )
            for word in words:
                assert word in said, f"{name}: {word!r} is not in {said!r}"
            assert not [leak for leak in ("Traceback", ".py", "Error(") if leak in said], said
    assert pids == (succ_stack.engine.pid, succ_stack.tokenizer.pid, (await succ_stack.load()).engine_pid)


async def test_chat_mistakes_name_the_message(succ_stack: Stack, eight_streams: None) -> None:
    table = [
        (pb.ChatRequest(), "messages"),
        (pb.ChatRequest(messages=[pb.ChatMessage(role="", content="x")]), "role"),
        (pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="y" * 300_000)] * 3), "messages"),
    ]
    async with grpc.aio.insecure_channel(succ_stack.target) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        for request, field in table:
            error = await refused(lambda request=request: stub.Chat(request))
            assert error.code() is INVALID, error.details()
            failure = translate(error.code(), error.details(), error.trailing_metadata())
            assert any(field in v.field for v in failure.field_violations), failure.field_violations


@pytest.mark.parametrize("values", [[-1], [2**32], [2**63 - 1], [49_152]])
async def test_detokenize_refuses_ids_that_do_not_exist(succ_stack: Stack, values: list[int]) -> None:
    """B095."""
    async with grpc.aio.insecure_channel(succ_stack.target) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.Detokenize(pb.DetokenizeRequest(token_ids=values))
    assert error.value.code() is INVALID
    assert str(values[0]) in str(error.value.details())


async def test_a_lone_surrogate_sent_as_raw_bytes_is_refused(succ_stack: Stack, eight_streams: None) -> None:
    """A client in another language may send what Python's protobuf refuses to build: CESU bytes of U+D800."""
    payload = b"\x12\x03\xed\xa0\x80"  # field 2 (text), three bytes
    async with grpc.aio.insecure_channel(succ_stack.target) as channel:
        call = channel.unary_stream("/tokenwire.tokenizer.v1.TokenizerService/Generate")
        error = await refused(lambda: call(payload))
    assert error.code() is INVALID, error


async def test_the_engine_refuses_by_itself_when_called_directly(succ_stack: Stack, eight_streams: None) -> None:
    request = engine_pb2.TokenRequest
    table = [
        (request(prompt_token_ids=[5] * 8193), "prompt_token_ids", ("8,193", "8,192")),
        (request(prompt_token_ids=[49_152]), "prompt_token_ids", ("49152",)),
        (request(), "prompt_token_ids", ()),
        (
            request(prompt_token_ids=[5], sampling=SamplingParams(temperature=math.nan)),
            "temperature",
            ("nan",),
        ),
        (
            request(prompt_token_ids=[5], sampling=SamplingParams(min_tokens=9, max_tokens=3)),
            "min_tokens",
            ("9",),
        ),
        (request(prompt_token_ids=[5], request_id="x" * 300), "request_id", ("300",)),
    ]
    async with grpc.aio.insecure_channel(succ_stack.engine_target) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        for message, field, words in table:
            error = await refused(lambda message=message: stub.Generate(engine_pb2.GenerateRequest(request=message)))
            failure = translate(error.code(), error.details(), error.trailing_metadata())
            assert error.code() is INVALID
            said = f"{error.details()} {failure.field_violations}"
            for word in (field, *words):
                assert word in said, said


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**31, 2**63 - 1])
async def test_every_int64_seed_is_reproducible(client: AsyncClient, seed: int) -> None:
    """B088."""
    from tokenwire_client import Sampling

    sampling = Sampling(temperature=2.0, max_tokens=6, seed=seed)
    first, second = [await client.generate("Hello", sampling).result() for _ in range(2)]
    assert first.token_ids == second.token_ids
    assert first.seed == second.seed == seed


async def test_alive_after_everything(client: AsyncClient, succ_stack: Stack) -> None:
    with contextlib.suppress(Exception):
        await client.models()
    await assert_alive(client)
    assert succ_stack.errors_logged() == []
