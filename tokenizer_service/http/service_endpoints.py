"""What tells about the service: models, health, readiness, metrics, the page.

Must not know: how requests are served.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from tokenizer_service.http.errors import FieldNames, HttpError, http_error
from tokenizer_service.http.facts import compact
from tokenizer_service.http.page import Page
from tokenizer_service.routing.router import Router
from tokenizer_service.sessions.validation import check_model

_NOT_READY = "no engine is connected, or the service is shutting down"


@dataclass(frozen=True, slots=True)
class ServiceEndpoints:
    """`started` in Unix seconds; `is_ready`: an engine is connected and new requests are taken."""

    model_name: str
    started: int
    router: Router
    registry: CollectorRegistry
    is_ready: Callable[[], bool]
    page: Page

    async def models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        refusal = check_model(request.path_params["name"], self.model_name)
        if refusal is not None:
            return error_response(http_error(refusal, FieldNames()))
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        model = self.router.model()
        return {
            "id": self.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "tokenwire",
            "max_model_len": None if model is None else model.max_model_len,
        }

    async def health(self, _request: Request) -> Response:
        """The process is alive."""
        return _json({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        if self.is_ready():
            return _json({"status": "ready"})
        return error_response(HttpError(503, _NOT_READY, code="not_ready", headers={"retry-after": "1"}))

    async def metrics(self, request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(self.registry), media_type=None, headers={"content-type": content_type})

    async def index(self, _request: Request) -> Response:
        return Response(self.page.html, headers=self.page.headers)


def _json(value: dict[str, Any]) -> Response:
    return Response(compact(value), media_type="application/json")


def error_response(error: HttpError) -> Response:
    return Response(error.body(), error.status, dict(error.headers), "application/json")
