"""Any OpenAI-compatible server as a target: POST /v1/completions or /v1/chat/completions with stream=true.

Must not know: schedules, statistics.
"""

import asyncio
import contextlib
import json
import ssl
import types
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from aiohttp.http_exceptions import LineTooLong

from tokenwire_client.load.outcomes import Part, RequestFailed
from tokenwire_client.load.workload import LoadRequest
from tokenwire_client.tls import Tls

_PREFIX = b"data:"
_LAST = b"[DONE]"
_LONGEST_LINE = 2**20
_LONGEST_MESSAGE = 300
_MOST_TOKENS = 10**9
# Kept connections are used again sooner than servers usually close them, so that no request meets a closing one.
_KEEP_ALIVE_S = 2.0
_CONNECT_TIMEOUT_S = 30.0
_END_WITHIN_S = 0.1


class HttpTarget:
    """Servers that count tokens in their `usage` are believed; else each chunk with text is one token."""

    def __init__(
        self,
        base_url: str,
        keys: Sequence[str | None],
        *,
        model: str,
        chat: bool = False,
        ignore_eos: bool = True,
        extra: Mapping[str, Any] | None = None,
        tls: Tls | None = None,
        keeps_connections: bool = True,
    ) -> None:
        """`extra` is added to each body. Without `keeps_connections` each request has a new one, as after a server
        broke one. Inside the event loop only."""
        context = _context(tls)
        self._kept = _session(aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S, ssl=context))
        self._fresh = _session(aiohttp.TCPConnector(limit=0, force_close=True, ssl=context))
        self._keeps_connections = keeps_connections
        self._server_name = None if tls is None else tls.server_name
        self._url = f"{base_url.rstrip('/')}/v1/{'chat/' if chat else ''}completions"
        self._headers = [{"Authorization": f"Bearer {key}"} if key else {} for key in keys]
        self._chat = chat
        self._common: dict[str, Any] = {
            "model": model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:  # no field of OpenAI's, but servers that run models themselves know it
            self._common["ignore_eos"] = True
        self._common |= extra or {}

    async def stream(self, request: LoadRequest) -> AsyncGenerator[Part, None]:
        try:
            async with await self._post(self.body(request), self._headers[request.tenant]) as response:
                if response.status != 200:
                    text = (await response.content.read(_LONGEST_MESSAGE)).decode(errors="replace")
                    raise RequestFailed(f"http_{response.status}", text)
                async for line in response.content:
                    if not line.startswith(_PREFIX):
                        continue
                    data = line[len(_PREFIX) :].strip()
                    if data == _LAST:
                        if self._keeps_connections:
                            await _read_end(response.content)
                        return
                    if part := part_of(data):
                        yield part
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            raise RequestFailed("connection", f"{type(error).__name__}: {error}"[:_LONGEST_MESSAGE]) from error
        except LineTooLong as error:
            raise RequestFailed("bad_stream", str(error)[:_LONGEST_MESSAGE]) from error
        raise RequestFailed("incomplete_stream", "the stream ended without [DONE]")

    async def _post(self, body: dict[str, Any], headers: Mapping[str, str]) -> aiohttp.ClientResponse:
        """The answer's beginning. A server that ends a connection which it said it would keep has not seen the request:
        it is sent again, and from then on each has a new connection."""
        if self._keeps_connections:
            use = _Use()
            try:
                return await self._send(self._kept, body, headers, use)
            except (aiohttp.ClientConnectionError, ConnectionError):
                if not use.is_reused:
                    raise
                self._keeps_connections = False
        return await self._send(self._fresh, body, headers, _Use())

    async def _send(
        self, session: aiohttp.ClientSession, body: dict[str, Any], headers: Mapping[str, str], use: "_Use"
    ) -> aiohttp.ClientResponse:
        return await session.post(
            self._url, json=body, headers=headers, server_hostname=self._server_name, trace_request_ctx=use
        )

    def body(self, request: LoadRequest) -> dict[str, Any]:
        body = self._common | {"max_tokens": request.max_tokens}
        if self._chat:
            return body | {"messages": [{"role": "user", "content": request.text}]}
        return body | {"prompt": request.text}

    async def close(self) -> None:
        await self._kept.close()
        await self._fresh.close()


@dataclass(slots=True)
class _Use:
    """Whether a request went over a connection that another one had used."""

    is_reused: bool = False


def _session(connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=_LONGEST_LINE, trace_configs=[trace]
    )


async def _note_reuse(
    _session: aiohttp.ClientSession,
    context: types.SimpleNamespace,
    _parameters: aiohttp.TraceConnectionReuseconnParams,
) -> None:
    context.trace_request_ctx.is_reused = True


async def _read_end(stream: aiohttp.StreamReader) -> None:
    """Only a connection whose answer was read to its end is used again; most servers end it with their last word."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_END_WITHIN_S):
            await stream.readany()


def _context(tls: Tls | None) -> ssl.SSLContext | bool:
    """True: the well-known authorities. RequestFailed for files that cannot be read."""
    if tls is None:
        return True
    try:
        context = ssl.create_default_context(cafile=tls.ca_file)
        if tls.cert_file is not None:
            context.load_cert_chain(tls.cert_file, tls.key_file)
    except OSError as error:
        raise RequestFailed("tls", f"a certificate or key cannot be read: {error.strerror or error}") from error
    return context


async def served_model(base_url: str, key: str | None, tls: Tls | None = None) -> str:
    """The first model that the server lists. Raises RequestFailed."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    url = f"{base_url.rstrip('/')}/v1/models"
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_CONNECT_TIMEOUT_S)) as session,
            session.get(
                url, headers=headers, ssl=_context(tls), server_hostname=None if tls is None else tls.server_name
            ) as response,
        ):
            if response.status != 200:
                raise RequestFailed(f"http_{response.status}", f"GET {url} answered {response.status}")
            return str((await response.json(content_type=None))["data"][0]["id"])
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise RequestFailed("connection", f"{url}: {type(error).__name__}: {error}") from error
    except (LookupError, TypeError, ValueError) as error:
        raise RequestFailed("bad_answer", f"{url} lists no model; name one with --model") from error


def part_of(data: bytes) -> Part | None:
    """What an event brings, None for nothing. RequestFailed for one that reports an error or is not as OpenAI's are."""
    try:
        event = json.loads(data)
    except (ValueError, RecursionError):
        raise RequestFailed("bad_stream", "an event is not JSON") from None
    if not isinstance(event, dict):
        raise RequestFailed("bad_stream", "an event is not an object")
    if event.get("error"):
        raise RequestFailed("error_event", str(event["error"])[:_LONGEST_MESSAGE])
    try:
        count = sum(_tokens_in(choice) for choice in event.get("choices") or ())
        usage = event.get("usage")
        if not usage:
            return Part(count) if count else None
        details = usage.get("prompt_tokens_details") or {}
    except (AttributeError, TypeError):
        raise RequestFailed("bad_stream", "choices or usage of an event are of a wrong type") from None
    return Part(
        count, _count(usage, "prompt_tokens"), _count(usage, "completion_tokens"), _count(details, "cached_tokens")
    )


def _count(counts: Any, name: str) -> int | None:
    """None where the server does not say. What is no count would spoil every figure it goes into."""
    value = counts.get(name) if isinstance(counts, dict) else None
    if value is not None and (type(value) is not int or not 0 <= value <= _MOST_TOKENS):
        raise RequestFailed("bad_stream", f"{name} of an event's usage is {str(value)[:40]!r}, which is no count")
    return value


def _tokens_in(choice: Mapping[str, Any]) -> int:
    """Their ids where the server gives them, else one for a chunk with text.

    In a completion also an empty chunk that is not the end counts: a part of a character. (A chat's first chunk has
    the role only.)
    """
    if choice.get("token_ids"):
        return len(choice["token_ids"])
    delta = choice.get("delta")
    if delta is not None:
        return int(any(delta.get(name) for name in ("content", "reasoning_content", "reasoning", "tool_calls")))
    return int(bool(choice.get("text")) or choice.get("finish_reason") is None)
