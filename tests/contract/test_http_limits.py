"""Bounds of HTTP connections on raw sockets: headers, bodies, connections, readers that do not read."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.http_calls import CHAT, body_of, http
from tests.fixtures.tokenizer_app import Service, default_model, eventually, running

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


async def hello(request: fe.FakeRequest) -> None:
    await request.play([1000], eos=2)


@asynccontextmanager
async def connection(service: Service) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", service.app.http_port, limit=2**24)
    try:
        yield reader, writer
    finally:
        writer.close()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, dict[str, Any]]:
    """Status and error object of an answer after which the server closes."""
    async with asyncio.timeout(10):
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head.lower()
    return int(head.split()[1]), json.loads(body)["error"]


@pytest.mark.parametrize("sent", [b"", b"GET /health", b"GET /health HTTP/1.1\r\nhost: x\r\nx-slow: "])
async def test_headers_that_do_not_come(sent: bytes) -> None:
    async with running(default_model(), hello, http_header_timeout=0.2) as service, connection(service) as (r, w):
        w.write(sent)
        assert (await answer_of(r))[0] == 408


async def test_headers_of_a_later_request_are_timed_too() -> None:
    async with running(default_model(), hello, http_header_timeout=0.2) as service, connection(service) as (r, w):
        w.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        first = await r.readuntil(b'{"status":"ok"}')
        assert first.startswith(b"HTTP/1.1 200")
        w.write(b"GET /health HTTP/1.1\r\nhost:")
        assert (await answer_of(r))[0] == 408


@pytest.mark.parametrize("where", ["many", "long", "url"])
async def test_headers_without_end(where: str) -> None:
    async with running(default_model(), hello) as service, connection(service) as (r, w):
        start = {
            "many": b"GET / HTTP/1.1\r\n" + b"x-a: b\r\n" * 20_000,
            "long": b"GET / HTTP/1.1\r\nx-a: " + b"b" * 200_000,
            "url": b"GET /" + b"a" * 200_000,
        }
        w.write(start[where])
        assert (await answer_of(r))[0] == 431
        async with http(service) as client:
            assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(
    "sent",
    [b"\x16\x03\x01hello\r\n\r\n", b"GARBAGE\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"],
)
async def test_what_is_no_http(sent: bytes) -> None:
    async with running(default_model(), hello) as service, connection(service) as (r, w):
        w.write(sent)
        assert (await answer_of(r))[0] == 400


async def test_a_body_beside_an_offer_of_http_2_is_read() -> None:
    """As Java's own client sends it; the connection goes on in HTTP/1.1 and serves the next request too."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUPGRADE: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n"
    body = json.dumps({"prompt": "\nUpgrade: a"}).encode()
    head = b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    async with running(default_model(), hello) as service, connection(service) as (r, w), asyncio.timeout(10):
        plain = head + b"content-length: %d\r\n\r\n" % len(body) + body
        answers = []
        for sent in (plain, plain.replace(b"host: x\r\n", offer), plain):
            w.write(sent)
            answers.append(await r.readuntil(b"}"))
        assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
        assert len({answer.partition(b"\r\n\r\n")[2] for answer in answers}) == 1


async def test_a_body_that_does_not_come() -> None:
    async with running(default_model(), hello, http_body_timeout=0.2) as service, connection(service) as (r, w):
        w.write(HEAD + b"content-length: 100\r\n\r\n{")
        status, error = await answer_of(r)
        assert (status, error["type"]) == (408, "timeout_error")


async def test_a_client_that_leaves_in_its_body() -> None:
    async with running(default_model(), hello) as service:
        async with connection(service) as (_, w):
            w.write(HEAD + b"content-length: 100\r\n\r\n{")
            await w.drain()
        async with http(service) as client:
            assert (await client.post(CHAT, json=body_of(CHAT))).status_code == 200
        assert service.outcomes() == {("HttpChat", "OK"): 1}


async def test_one_connection_too_many() -> None:
    async with running(default_model(), hello, http_max_connections=2) as service:
        async with connection(service) as (r1, w1), connection(service) as (_, w2):
            for writer in (w1, w2):
                writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            await r1.readuntil(b'{"status":"ok"}')
            async with connection(service) as (r, _):
                status, error = await answer_of(r)
                assert (status, error["code"]) == (503, "service_unavailable")
        async with http(service) as client:
            await eventually(lambda: not service.app._http._server.server_state.connections)  # type: ignore[union-attr]
            assert (await client.get("/health")).status_code == 200


async def test_a_reader_that_does_not_read_is_cut_off() -> None:
    """The request ends in the engine, the service keeps a bounded part of its text, and others go on."""

    async def flood(request: fe.FakeRequest) -> None:
        if request.client_id == "good":
            await hello(request)
            return
        while not request.cancelled.is_set():
            await request.send([1000] * 64)
            await asyncio.sleep(0)

    settings = {"http_write_timeout": 0.5, "max_unread_tokens": 4096}
    async with running(default_model(), flood, **settings) as service, connection(service) as (r, w):
        body = json.dumps(body_of(CHAT, stream=True)).encode()
        w.write(HEAD + f"content-length: {len(body)}\r\n\r\n".encode() + body)
        await w.drain()
        r._transport.pause_reading()  # type: ignore[attr-defined]
        await service.engine.wait_until(lambda: service.engine.num_cancelled == 1)
        async with http(service) as client:
            good = await client.post(CHAT, json=body_of(CHAT), headers={"x-request-id": "good"})
            assert good.status_code == 200
        await eventually(lambda: service.metric("active_requests") == 0)
        codes = {code for (_, code), _ in service.outcomes().items()}
        assert codes <= {"OK", "CANCELLED", "RESOURCE_EXHAUSTED"}
        r._transport.resume_reading()  # type: ignore[attr-defined]
        rest = b""
        try:
            while part := await r.read(2**20):
                rest += part
        except ConnectionError:
            pass
        assert b"[DONE]" not in rest


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with running(default_model(), hello) as service, connection(service) as (r, w):
        for name in (b"/health", b"/ready", b"/v1/models"):
            w.write(b"GET " + name + b" HTTP/1.1\r\nhost: x\r\n\r\n")
        data = await r.readuntil(b'"tokenwire","max_model_len":8192}]}')
        places = [data.index(text) for text in (b'{"status":"ok"}', b'{"status":"ready"}', b'"object":"list"')]
        assert places == sorted(places)
