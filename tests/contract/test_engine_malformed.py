"""Bytes that are no valid message, sent to the engine service directly: INVALID_ARGUMENT, never UNKNOWN."""

from typing import Any

import grpc
import pytest

from tests.fixtures.scripted_engine import ScriptedService, continuation, scripted_service
from tokenwire.common.v1.sampling_pb2 import SamplingParams
from tokenwire.engine.v1 import engine_pb2

_GOOD = engine_pb2.TokenRequest(
    prompt_token_ids=[5, 6], request_id="A", sampling=SamplingParams(max_tokens=3, temperature=0.0)
)


def _bad_text(message: Any) -> bytes:
    """The message with a byte that is no UTF-8 in place of its letter A."""
    data: bytes = message.SerializeToString()
    assert data.count(b"A") == 1
    return data.replace(b"A", b"\xff")


async def _status(service: ScriptedService, method: str, data: bytes) -> tuple[grpc.StatusCode, str]:
    kind = service.channel.unary_stream if method == "Generate" else service.channel.unary_unary
    call: Any = kind(f"/tokenwire.engine.v1.EngineService/{method}", bytes, bytes)(data)
    return await call.code(), await call.details()


@pytest.mark.parametrize(
    ("method", "data", "words"),
    [
        ("Generate", _bad_text(engine_pb2.GenerateRequest(request=_GOOD)), "request.request_id: the text is not valid"),
        ("Generate", b"\xff\xff", "GenerateRequest"),
        ("Abort", _bad_text(engine_pb2.AbortRequest(request_ids=["ok", "A"])), "request_ids[1]"),
        ("GetModelInfo", b"\xff", "GetModelInfoRequest"),
        ("GetLoad", b"\xff", "GetLoadRequest"),
    ],
)
async def test_a_message_that_cannot_be_read_is_the_clients_mistake(method: str, data: bytes, words: str) -> None:
    async with scripted_service() as service:
        code, details = await _status(service, method, data)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in details


@pytest.mark.parametrize("opens_first", [False, True])
async def test_a_session_ends_at_a_message_that_cannot_be_read(opens_first: bool) -> None:
    """Its requests end with it; another session is not concerned."""
    submit = engine_pb2.SubmitRequest(handle=1, request=_GOOD)
    opening = engine_pb2.SessionRequest(open=engine_pb2.OpenSession())
    async with scripted_service() as service:
        method = service.channel.stream_stream("/tokenwire.engine.v1.EngineService/Session", bytes, bytes)
        call: Any = method()
        if opens_first:
            await call.write(opening.SerializeToString())
            assert engine_pb2.SessionResponse.FromString(await call.read()).HasField("opened")
        await call.write(_bad_text(engine_pb2.SessionRequest(submit=submit)))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "submit.request.request_id" in await call.details()
        other = service.stub.Session()
        await other.write(opening)
        await other.read()
        await other.write(engine_pb2.SessionRequest(submit=submit))
        tokens: list[int] = []
        while len(tokens) < 3:
            message = await other.read()
            assert isinstance(message, engine_pb2.SessionResponse)
            tokens += message.step.outputs[0].token_ids
        assert tokens == continuation([5, 6], 3)
