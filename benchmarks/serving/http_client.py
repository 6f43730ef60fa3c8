"""Measured client of any OpenAI-compatible server: POST /v1/completions with stream=true.

Must not know: how the server is started, statistics.
"""

import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from benchmarks.serving.closed_loop import OnTokens, Send
from benchmarks.serving.workload import BenchRequest

_PREFIX = b"data:"
_LAST = b"[DONE]"
_LONGEST_LINE = 2**20


@contextlib.asynccontextmanager
async def http_client(base_url: str, extra: Mapping[str, Any]) -> AsyncIterator[Send]:
    """`extra` is added to each body. A new connection for each request: some servers break kept ones."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    no_limit = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        base_url, connector=connector, timeout=no_limit, read_bufsize=_LONGEST_LINE
    ) as session:
        model = await served_model(session)

        async def send(request: BenchRequest, on_tokens: OnTokens) -> int | None:
            body = completion_body(model, request) | dict(extra)
            async with session.post("/v1/completions", json=body) as response:
                if response.status != 200:
                    raise RuntimeError(f"HTTP {response.status}: {(await response.text())[:300]}")
                return await _read(response.content, on_tokens)

        yield send


async def served_model(session: aiohttp.ClientSession) -> str:
    """The first model that the server lists."""
    async with session.get("/v1/models") as response:
        response.raise_for_status()
        return str((await response.json(content_type=None))["data"][0]["id"])


def completion_body(model: str, request: BenchRequest) -> dict[str, Any]:
    """Greedy; `ignore_eos` is no field of OpenAI's, but the servers that run models themselves know it."""
    return {
        "model": model,
        "prompt": request.text,
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


async def _read(lines: aiohttp.StreamReader, on_tokens: OnTokens) -> int | None:
    """Raises ConnectionError when the stream ends without its last line."""
    tokens: int | None = None
    async for line in lines:
        if not line.startswith(_PREFIX):
            continue
        data = line[len(_PREFIX) :].strip()
        if data == _LAST:
            return tokens
        event = json.loads(data)
        if count := tokens_in(event):
            on_tokens(count)
        usage = event.get("usage")
        if usage:
            tokens = int(usage["completion_tokens"])
    raise ConnectionError("the stream ended without [DONE]")


def tokens_in(event: Mapping[str, Any]) -> int:
    """Tokens of one event: their ids where the server gives them, else one for a chunk that is not only the end.

    Raises RuntimeError for an event that reports an error.
    """
    if "error" in event:
        raise RuntimeError(str(event["error"])[:300])
    count = 0
    for choice in event.get("choices", ()):
        if choice.get("token_ids"):
            count += len(choice["token_ids"])
        elif choice.get("text") or choice.get("finish_reason") is None:
            count += 1
    return count
