"""Puts the HTTP application together: routes, what every request passes, and errors in OpenAI's shape.

Starlette rather than FastAPI: requests are read by our own bounded JSON reader into pydantic types, and streams are
written event by event, so that of FastAPI only its weight would be used. Must not know: sockets, settings.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog
from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from service_runtime.tracing import NO_TRACER, Tracer
from tokenizer_service.http.chat_fields import ChatFields
from tokenizer_service.http.completion_fields import CompletionFields
from tokenizer_service.http.endpoint import GenerationEndpoint
from tokenizer_service.http.errors import HttpError
from tokenizer_service.http.exchange import Exchange, ExchangeLimits, Receive, Scope, Send
from tokenizer_service.http.generations import Generations
from tokenizer_service.http.guard import Guard, HttpMetrics
from tokenizer_service.http.page import Page
from tokenizer_service.http.plain_calls import PlainCalls
from tokenizer_service.http.readers import Readers
from tokenizer_service.http.response_fields import ResponseFields
from tokenizer_service.http.service_endpoints import ServiceEndpoints, error_response
from tokenizer_service.http.text_endpoints import TextEndpoints
from tokenizer_service.tenants.gate import Gate

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class HttpParts:
    """What the application is made of; `clock` gives Unix seconds."""

    generations: Generations
    registry: CollectorRegistry
    is_ready: Callable[[], bool]
    clock: Callable[[], float]
    limits: ExchangeLimits
    gate: Gate
    cors_origins: Sequence[str]
    tracer: Tracer = NO_TRACER


def build_app(parts: HttpParts) -> ASGIApp:
    routes = _routes(parts)
    metrics = HttpMetrics(parts.registry, [route.path for route in routes])
    new_id = parts.generations.intake.new_id
    middleware = [Middleware(Guard, gate=parts.gate, metrics=metrics, new_id=new_id, tracer=parts.tracer)]
    if parts.cors_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=list(parts.cors_origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
        middleware.insert(0, cors)
    handlers = {HTTPException: _http_exception, Exception: _failure}
    return Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)


def _routes(parts: HttpParts) -> list[Route]:
    generations, intake = parts.generations, parts.generations.intake
    open_exchange = partial(Exchange, limits=parts.limits, pool=intake.texts.pool)
    readers = Readers(intake.texts, intake.model_name, intake.new_id, parts.clock)
    calls = PlainCalls(generations.runner, intake.texts)
    texts = TextEndpoints(calls, open_exchange, intake.model_name, intake.allow_chat_template)
    service = ServiceEndpoints(
        intake.model_name, int(parts.clock()), intake.texts.router, parts.registry, parts.is_ready, Page.load()
    )
    return [
        *_generating_routes(generations, readers, open_exchange),
        Route("/tokenize", _Application(texts.tokenize), methods=["POST"]),
        Route("/detokenize", _Application(texts.detokenize), methods=["POST"]),
        Route("/v1/models", service.models, methods=["GET"]),
        Route("/v1/models/{name:path}", service.model, methods=["GET"]),
        Route("/health", service.health, methods=["GET"]),
        Route("/ready", service.ready, methods=["GET"]),
        Route("/metrics", service.metrics, methods=["GET"]),
        Route("/", service.index, methods=["GET"]),
    ]


def _generating_routes(
    generations: Generations, readers: Readers, open_exchange: Callable[[Scope, Receive, Send], Exchange]
) -> list[Route]:
    chat = GenerationEndpoint("HttpChat", generations, ChatFields, readers.chat, open_exchange)
    completion = GenerationEndpoint("HttpCompletions", generations, CompletionFields, readers.completion, open_exchange)
    response = GenerationEndpoint("HttpResponses", generations, ResponseFields, readers.response, open_exchange)
    return [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/v1/responses", response, methods=["POST"]),
    ]


@dataclass(frozen=True, slots=True)
class _Application:
    """A bound method as an ASGI application: Starlette takes a plain function for a request handler."""

    app: ASGIApp

    async def __call__(self, *triple: object) -> None:
        await self.app(*triple)  # type: ignore[arg-type]


async def _http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own: an unknown path or a wrong method."""
    assert isinstance(error, HTTPException)
    headers = dict(error.headers or {})
    known = {
        404: (f"there is nothing at {request.url.path[:256]}", "not_found"),
        405: (f"{request.method[:32]} is not allowed here; {headers.get('Allow', '')} is", "method_not_allowed"),
    }
    text, code = known.get(error.status_code, ("the request cannot be served", None))
    return error_response(HttpError(error.status_code, text, code=code, headers=headers))


async def _failure(_request: Request, _error: Exception) -> Response:
    """A failure of ours, which Starlette raises again for the log once this was sent."""
    return error_response(HttpError(500, "the service failed on this request"))
