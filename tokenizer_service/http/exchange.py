"""One HTTP request and its answer: what was asked, who still listens, and the ways to answer.

Must not know: what the endpoints do.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar

from starlette.datastructures import Headers

from service_runtime.trace_context import TraceContext
from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.http.errors import FieldNames, HttpError, bad_field, http_error
from tokenizer_service.http.fields import FieldsT, read_fields
from tokenizer_service.http.json_body import BodyLimits, ClientLeft, parse_object, read_body
from tokenizer_service.sessions.encode_pool import EncodePool
from tokenizer_service.tenants.tenant import ANONYMOUS, Tenant

Scope: TypeAlias = MutableMapping[str, Any]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
T = TypeVar("T")

TENANT = "tokenwire.tenant"  # what the scope says of who asks
TRACE = "tokenwire.trace"  # and of the trace that the request is in
PEER_NAMES = "tokenwire.peer_names"  # the connection's extension that gives the names in the client's certificate
ABORT = "tokenwire.abort"  # the connection's extension that cuts it off at once
LONGEST_TIMEOUT_S = 86_400.0
_LARGE_BODY = 32 * 1024
_JSON = "application/json"
REQUEST_ID, TIMEOUT = "x-request-id", "x-request-timeout"


@dataclass(frozen=True, slots=True)
class ExchangeLimits:
    """`write_timeout_s`: so long may a client leave an answer unread before it is cut off."""

    body: BodyLimits
    write_timeout_s: float


@dataclass(slots=True)
class Exchange:
    """The ASGI triple of one request, with bounds. Every write waits while the client does not read."""

    scope: Scope
    receive: Receive
    send: Send
    limits: ExchangeLimits
    pool: EncodePool
    is_started: bool = False
    headers: Headers = field(init=False)

    def __post_init__(self) -> None:
        self.headers = Headers(scope=self.scope)

    @property
    def request_id(self) -> str:
        """The client's own id of the request, "" for none."""
        return self.headers.get(REQUEST_ID, "")

    @property
    def tenant(self) -> Tenant:
        found: Tenant = self.scope.get(TENANT, ANONYMOUS)
        return found

    @property
    def trace(self) -> TraceContext | None:
        found: TraceContext | None = self.scope.get(TRACE)
        return found

    def deadline(self, now: float) -> float | HttpError | None:
        """The reading of the loop's clock at which the client gives up, as it said."""
        text = self.headers.get(TIMEOUT)
        if text is None:
            return None
        with contextlib.suppress(ValueError):
            seconds = float(text)
            if 0 < seconds <= LONGEST_TIMEOUT_S:
                return now + seconds
        return bad_field("X-Request-Timeout", f"{text[:40]!r} is no number of seconds in (0, {LONGEST_TIMEOUT_S:g}]")

    async def read(self, kind: type[FieldsT]) -> FieldsT | HttpError:
        """The body's fields; a large body is read in a thread, so that it holds up nobody. Raises ClientLeft."""
        body = await read_body(self.headers, self.receive, self.limits.body)
        if isinstance(body, HttpError):
            return body
        if len(body) <= _LARGE_BODY:
            return _parse(kind, body)
        return await self.in_thread(lambda: _parse(kind, body))

    async def in_thread(self, work: Callable[[], T]) -> T | HttpError:
        """The result of what would hold up the event loop."""
        result = await self.pool.run(work)
        return http_error(result, FieldNames()) if isinstance(result, Refusal) else result

    async def answer(
        self, body: bytes, *, status: int = 200, content_type: str = _JSON, headers: Mapping[str, str] | None = None
    ) -> None:
        """The whole answer at once."""
        await self.start(status, {"content-length": str(len(body)), "content-type": content_type, **(headers or {})})
        await self.write(body, more=False)

    async def fail(self, error: HttpError) -> None:
        await self.answer(error.body(), status=error.status, headers=error.headers)

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.is_started = True
        raw = [(name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def write(self, body: bytes, *, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        try:
            async with asyncio.timeout(self.limits.write_timeout_s):
                await self.send(message)
        except TimeoutError:
            abort = self.scope.get("extensions", {}).get(ABORT)
            if abort is not None:
                abort()
            raise ClientLeft from None

    async def while_listening(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`, which is cancelled when the client leaves: then raises ClientLeft."""
        worker = asyncio.create_task(work)
        watcher = asyncio.create_task(self._until_gone())
        try:
            await asyncio.wait((worker, watcher), return_when=asyncio.FIRST_COMPLETED)
            if worker.done():
                return await worker
            raise ClientLeft
        finally:
            watcher.cancel()
            worker.cancel()
            await asyncio.gather(worker, watcher, return_exceptions=True)

    async def _until_gone(self) -> None:
        while (await self.receive())["type"] != "http.disconnect":
            pass


def _parse(kind: type[FieldsT], body: bytes) -> FieldsT | HttpError:
    value = parse_object(body)
    return value if isinstance(value, HttpError) else read_fields(kind, value)
