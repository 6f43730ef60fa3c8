"""Measured client of any OpenAI-compatible server: the HTTP target of `tokenwire load`, in this benchmark's loop.

Must not know: how the server is started, statistics.
"""

import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

from benchmarks.serving.closed_loop import OnTokens, Send
from benchmarks.serving.workload import BenchRequest
from tokenwire_client.load.http_target import HttpTarget, served_model
from tokenwire_client.load.workload import LoadRequest


@contextlib.asynccontextmanager
async def http_client(base_url: str, extra: Mapping[str, Any]) -> AsyncIterator[Send]:
    """`extra` is added to each body. A new connection for each request: some servers break kept ones."""
    model = await served_model(base_url, None)
    target = HttpTarget(base_url, [None], model=model, extra=extra, keeps_connections=False)

    async def send(request: BenchRequest, on_tokens: OnTokens) -> int | None:
        counted: int | None = None
        prompt = LoadRequest(request.key, request.text, len(request.token_ids), request.max_tokens)
        async for part in target.stream(prompt):
            if part.tokens:
                on_tokens(part.tokens)
            if part.completion_tokens is not None:
                counted = part.completion_tokens
        return counted

    try:
        yield send
    finally:
        await target.close()
