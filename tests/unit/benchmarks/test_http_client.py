"""The HTTP client against a real server on a socket that streams what the servers of peers stream."""

import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from benchmarks.serving.closed_loop import Send
from benchmarks.serving.http_client import http_client
from benchmarks.serving.workload import BenchRequest
from tokenwire_client.load.outcomes import RequestFailed

REQUEST = BenchRequest(0, " a b", (5, 6), 3)
DONE = "data: [DONE]\n\n"


def chunk(text: str, finish_reason: str | None = None) -> str:
    return "data: " + json.dumps({"choices": [{"text": text, "finish_reason": finish_reason}]}) + "\n\n"


def usage(tokens: int) -> str:
    return "data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}) + "\n\n"


@contextlib.asynccontextmanager
async def client_of(body: list[str], status: int = 200) -> AsyncIterator[tuple[Send, list[dict[str, object]]]]:
    """A server that answers every completion with `body`, and the requests it got."""
    seen: list[dict[str, object]] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        seen.append(await request.json())
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for part in body:
            await response.write(part.encode())
        await response.write_eof()
        return response

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "some-model"}]})

    application = web.Application()
    application.add_routes([web.post("/v1/completions", complete), web.get("/v1/models", models)])
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        async with http_client(f"http://{host}:{port}", {"top_k": 5}) as send:
            yield send, seen
    finally:
        await runner.cleanup()


async def test_every_token_is_told_and_the_servers_count_returned() -> None:
    body = [": ping\n\n", chunk(" x"), chunk(""), chunk(" y"), chunk("", "length"), usage(3), DONE]
    counts: list[int] = []
    async with client_of(body) as (send, seen):
        assert await send(REQUEST, counts.append) == 3
    assert counts == [1, 1, 1]
    (sent,) = seen
    assert sent["prompt"] == " a b"
    assert (sent["model"], sent["max_tokens"], sent["top_k"]) == ("some-model", 3, 5)
    assert (sent["stream"], sent["ignore_eos"], sent["temperature"]) == (True, True, 0.0)


async def test_without_usage_nothing_is_known_of_the_number() -> None:
    async with client_of([chunk(" x"), DONE]) as (send, _):
        assert await send(REQUEST, lambda _: None) is None


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        pytest.param([chunk(" x")], 200, "without", id="the stream breaks off"),
        pytest.param(["no such model"], 404, "http_404.*no such model", id="refused"),
        pytest.param(['data: {"error": {"message": "out of slots"}}\n\n', DONE], 200, "out of slots", id="error event"),
    ],
)
async def test_an_answer_that_is_not_whole_raises(body: list[str], status: int, message: str) -> None:
    async with client_of(body, status) as (send, _):
        with pytest.raises(RequestFailed, match=message):
            await send(REQUEST, lambda _: None)
