"""The HTTP target against a real server on a socket that streams what servers stream."""

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tests.fixtures.certificates import Authority
from tokenwire_client.load.http_target import HttpTarget, part_of, served_model
from tokenwire_client.load.outcomes import Part, RequestFailed
from tokenwire_client.load.workload import LoadRequest
from tokenwire_client.tls import Tls

REQUEST = LoadRequest(0, " a b", 2, 3, tenant=1)
DONE = "data: [DONE]\n\n"


def event(value: object) -> str:
    return f"data: {json.dumps(value)}\n\n"


def chunk(text: str, finish_reason: str | None = None) -> str:
    return event({"choices": [{"text": text, "finish_reason": finish_reason}]})


def said(content: str | None, **more: object) -> str:
    return event({"choices": [{"delta": {"content": content, **more}, "finish_reason": None}]})


USAGE = event(
    {
        "choices": [],
        "usage": {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}},
    }
)


@contextlib.asynccontextmanager
async def server(
    body: Sequence[str], status: int = 200, models: object = None, tls: ssl.SSLContext | None = None
) -> AsyncIterator[tuple[str, list[Any]]]:
    """A server that answers everything with `body`: its URL and (path, headers, body, peer) of what it got."""
    seen: list[Any] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        peer = request.transport.get_extra_info("peername")
        seen.append((request.path, request.headers.copy(), await request.json(), peer))
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for part in body:
            await response.write(part.encode())
        await response.write_eof()
        return response

    async def list_models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "some-model"}]} if models is None else models)

    application = web.Application()
    application.add_routes([web.post("/v1/{path:.*}", answer), web.get("/v1/models", list_models)])
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls).start()
        host, port = runner.addresses[0][:2]
        yield f"http{'s' if tls else ''}://{host}:{port}", seen
    finally:
        await runner.cleanup()


async def parts_of(url: str, **options: Any) -> list[Part]:
    target = HttpTarget(url, [None, "secret"], model="m", **options)
    try:
        return [part async for part in target.stream(REQUEST)]
    finally:
        await target.close()


async def test_a_completion_is_read_and_asked_for_as_it_should() -> None:
    body = [": ping\n\n", chunk(" x"), chunk(""), chunk(" y"), chunk("", "length"), USAGE, DONE]
    async with server(body) as (url, seen):
        parts = await parts_of(f"{url}/", extra={"top_k": 5})
    assert parts == [Part(1), Part(1), Part(1), Part(0, 2, 3, 1)]
    ((path, headers, sent, _),) = seen
    assert (path, headers["Authorization"]) == ("/v1/completions", "Bearer secret")
    assert sent == {
        "model": "m",
        "prompt": " a b",
        "max_tokens": 3,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_k": 5,
    }


async def test_a_chat_is_read_and_asked_for_as_it_should() -> None:
    body = [said("", role="assistant"), said("x"), said(None, reasoning_content="hm"), USAGE, DONE]
    async with server(body) as (url, seen):
        parts = await parts_of(url, chat=True, ignore_eos=False)
    assert parts == [Part(1), Part(1), Part(0, 2, 3, 1)]
    ((path, _, sent, _),) = seen
    assert path == "/v1/chat/completions"
    assert sent["messages"] == [{"role": "user", "content": " a b"}]
    assert "ignore_eos" not in sent


@pytest.mark.parametrize(
    ("body", "status", "wanted"),
    [
        pytest.param([chunk(" x")], 200, "incomplete_stream", id="the stream ends without its last word"),
        pytest.param(["slow down"], 429, "http_429", id="refused"),
        pytest.param([event({"error": {"message": "out of slots"}}), DONE], 200, "error_event", id="error event"),
        pytest.param(["data: {\n\n", DONE], 200, "bad_stream", id="not JSON"),
        pytest.param(["data: [1]\n\n", DONE], 200, "bad_stream", id="not an object"),
        pytest.param(["data: " + "x" * 2**23, DONE], 200, "bad_stream", id="an endless line"),
    ],
)
async def test_an_answer_that_is_not_whole_is_an_error(body: list[str], status: int, wanted: str) -> None:
    async with server(body, status) as (url, _):
        with pytest.raises(RequestFailed) as caught:
            await parts_of(url)
    assert caught.value.status == wanted
    assert len(caught.value.message) <= 300


async def test_nobody_there_is_an_error() -> None:
    async with server([DONE]) as (url, _):
        pass
    with pytest.raises(RequestFailed) as caught:
        await parts_of(url)
    assert caught.value.status == "connection"
    with pytest.raises(RequestFailed, match="connection"):
        await served_model(url, None)


async def test_a_server_with_an_authority_of_its_own(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path), Authority(tmp_path, "other")
    identity = ours.server("here", "model.internal")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.cert, identity.key)
    async with server([chunk("x"), DONE], tls=context) as (url, _):
        tls = Tls(ours.ca, server_name="model.internal")
        assert await served_model(url, None, tls) == "some-model"
        assert await parts_of(url, tls=tls) == [Part(1)]
        for wrong in (Tls(ours.ca), Tls(other.ca, server_name="model.internal"), None):
            with pytest.raises(RequestFailed, match="connection"):
                await parts_of(url, tls=wrong)
    with pytest.raises(RequestFailed, match="cannot be read: No such file"):
        await parts_of(url, tls=Tls(tmp_path / "none.pem"))


@pytest.mark.parametrize(("keeps", "connections"), [(True, 1), (False, 5)])
async def test_connections_are_used_again_or_not(keeps: bool, connections: int) -> None:
    async with server([chunk("x"), DONE]) as (url, seen):
        target = HttpTarget(url, [None, None], model="m", keeps_connections=keeps)
        for _ in range(5):
            assert [part async for part in target.stream(REQUEST)] == [Part(1)]
        await target.close()
    assert len({peer for _, _, _, peer in seen}) == connections


@contextlib.asynccontextmanager
async def hasty_server(answers: int) -> AsyncIterator[tuple[str, list[int]]]:
    """Keeps each connection open for `answers` requests and ends it, unannounced, when one more has come. Gives its
    URL and how many requests each connection has brought."""
    brought: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(brought)
        brought.append(0)
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
                await reader.readexactly(int(length.partition(b":")[2]))
                brought[number] += 1
                if brought[number] > answers:
                    return
                text = (chunk(" x") + USAGE + DONE).encode()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        host, port = listening.sockets[0].getsockname()
        yield f"http://{host}:{port}", brought


async def test_a_server_that_keeps_no_connections_loses_no_request() -> None:
    async with hasty_server(answers=1) as (url, brought):
        target = HttpTarget(url, [None, None], model="m")
        for _ in range(4):
            assert [part async for part in target.stream(REQUEST)] == [Part(1), Part(0, 2, 3, 1)]
        await target.close()
    # The second request met the end of the first connection; after it nobody tries that again.
    assert brought == [2, 1, 1, 1]


async def test_a_request_that_a_server_may_have_begun_is_not_sent_again() -> None:
    async with hasty_server(answers=0) as (url, brought):
        with pytest.raises(RequestFailed) as failed:
            await parts_of(url)
    assert failed.value.status == "connection"
    assert brought == [1]


async def test_the_first_model_is_taken() -> None:
    async with server([DONE]) as (url, _):
        assert await served_model(url, "key") == "some-model"
    async with server([DONE], models={"data": []}) as (url, _):
        with pytest.raises(RequestFailed, match="lists no model"):
            await served_model(url, None)


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        ({"choices": [{"text": "xyz", "token_ids": [1, 2, 3], "finish_reason": None}]}, Part(3)),
        ({"choices": [{"text": "x", "finish_reason": "stop"}]}, Part(1)),
        ({"choices": [{"text": "", "finish_reason": "length"}]}, None),
        ({"choices": [], "usage": {"completion_tokens": 4}}, Part(0, None, 4, None)),
        ({"choices": [{"text": "x"}], "usage": None}, Part(1)),
        ({}, None),
    ],
)
def test_parts_of_an_event(value: dict[str, object], wanted: Part | None) -> None:
    assert part_of(json.dumps(value).encode()) == wanted


@pytest.mark.parametrize(
    "data",
    [
        '{"usage": {"completion_tokens": "4"}}',
        '{"usage": {"prompt_tokens": -1}}',
        '{"usage": {"prompt_tokens": 1e400}}',
        '{"usage": {"prompt_tokens": true}}',
        '{"usage": {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": {}}}}',
        '{"usage": [4]}',
        '{"choices": 4}',
        '{"choices": ["text"]}',
        '{"choices": [{"delta": "text"}]}',
        '{"choices": [{"token_ids": 4}]}',
        "[" * 100_000,
    ],
)
def test_an_event_of_another_kind_is_the_servers_error(data: str) -> None:
    """Not one of the load generator, and no figure is made of it."""
    with pytest.raises(RequestFailed) as caught:
        part_of(data.encode())
    assert caught.value.status == "bad_stream"
