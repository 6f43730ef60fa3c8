"""What every HTTP request passes: its id, who asks, one count of its answer.

Must not know: what the endpoints do.
"""

import asyncio
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import structlog
from prometheus_client import CollectorRegistry, Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp

from service_runtime.tracing import NO_TRACER, Anchor, Tracer
from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.http.errors import HttpError
from tokenizer_service.http.exchange import PEER_NAMES, REQUEST_ID, TENANT, TRACE, Receive, Scope, Send
from tokenizer_service.http.http_trace import HttpTrace
from tokenizer_service.tenants.gate import MISSING_KEY, Gate

_log = structlog.get_logger()
OPEN_PATHS = frozenset({"/", "/health", "/ready"})
MAX_ID_CHARS = 256
Message: TypeAlias = MutableMapping[str, Any]


class HttpMetrics:
    """Answers by route and status; a path that is no route counts as "other"."""

    def __init__(self, registry: CollectorRegistry, routes: Iterable[str]) -> None:
        self._routes = frozenset(routes)
        self._responses = Counter(
            "tokenwire_tokenizer_http_responses",
            "HTTP answers begun, by route and status; generations are also in requests_total.",
            ["route", "status"],
            registry=registry,
        )

    def count(self, path: str, status: int) -> None:
        self._responses.labels(route=self.route(path), status=str(status)).inc()

    def route(self, path: str) -> str:
        """A name from a bounded set."""
        return path if path in self._routes else "/v1/models/{id}" if path.startswith("/v1/models/") else "other"


@dataclass(frozen=True, slots=True)
class Guard:
    """ASGI middleware around everything. `new_id` names requests that came without an id."""

    app: ASGIApp
    gate: Gate
    metrics: HttpMetrics
    new_id: Callable[[], str]
    tracer: Tracer = NO_TRACER

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """A request that may ask for work is traced, from here to the last byte of its answer."""
        if scope["method"] != "POST":
            await self._serve(scope, receive, send)
            return
        clock = asyncio.get_running_loop().time
        trace = HttpTrace.begin(self.tracer, scope, self.metrics.route(scope["path"]), Anchor.of(clock))
        try:
            await self._serve(scope, receive, trace.watching(send))
        finally:
            trace.end(clock())

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        request_id = headers.get(REQUEST_ID, "")
        error = _check_id(request_id) or self._identify(scope, headers)
        shown = self.new_id() if not request_id or error is not None else request_id

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.count(scope["path"], message["status"])
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID.encode(), shown.encode())]
            await send(message)

        if error is not None:
            trace = scope.get(TRACE)
            fields = {} if trace is None else {"trace_id": trace.trace_id}
            _log.info("http_refused", path=scope["path"][:256], status=error.status, request_id=shown, **fields)
            await _answer(send_noted, error)
            return
        scope["headers"] = [item for item in scope["headers"] if item[0] != REQUEST_ID.encode()]
        scope["headers"].append((REQUEST_ID.encode(), shown.encode()))
        with structlog.contextvars.bound_contextvars(request_id=shown):
            await self.app(scope, receive, send_noted)

    def _identify(self, scope: Scope, headers: Headers) -> HttpError | None:
        """Notes the tenant in the scope."""
        # A preflight cannot carry a key.
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return None
        names = scope.get("extensions", {}).get(PEER_NAMES)
        found = self.gate.identify(headers.getlist("authorization"), names() if names is not None else ())
        if isinstance(found, Refusal):
            code = "missing_api_key" if found is MISSING_KEY else "invalid_api_key"
            return HttpError(401, found.message, code=code, headers={"www-authenticate": "Bearer"})
        scope[TENANT] = found
        return None


def _check_id(request_id: str) -> HttpError | None:
    if len(request_id) > MAX_ID_CHARS:
        text = f"X-Request-Id: {len(request_id):,} characters exceed the limit of {MAX_ID_CHARS}"
        return HttpError(400, text, "X-Request-Id")
    if request_id and not (request_id.isascii() and request_id.isprintable()):
        return HttpError(400, "X-Request-Id: only printable ASCII characters may be used", "X-Request-Id")
    return None


async def _answer(send: Send, error: HttpError) -> None:
    body = error.body()
    headers = {"content-type": "application/json", "content-length": str(len(body)), **error.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": error.status, "headers": raw})
    await send({"type": "http.response.body", "body": body, "more_body": False})
