"""What tells about the service: models, health, readiness, metrics, the page.

Must not know: how requests are served.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response

from service_runtime.metrics_page import render_page
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
        adapters = [self._model(name) for name in sorted(self.router.adapters())]
        return _json({"object": "list", "data": [self._model(), *adapters]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        refusal = check_model(name, self.model_name, self.router.adapter_names)
        if refusal is not None:
            return error_response(http_error(refusal, FieldNames()))
        return _json(self._model("" if name == self.model_name else name))

    def _model(self, adapter: str = "") -> dict[str, Any]:
        """The model itself, or an adapter of it."""
        model = self.router.model()
        return {
            "id": adapter or self.model_name,
            "object": "model",
            "created": self.started,
            "owned_by": "tokenwire",
            "max_model_len": None if model is None else model.max_model_len,
        } | ({"parent": self.model_name} if adapter else {})

    async def health(self, _request: Request) -> Response:
        """The process is alive."""
        return _json({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        if self.is_ready():
            return _json({"status": "ready"})
        return error_response(HttpError(503, _NOT_READY, code="not_ready", headers={"retry-after": "1"}))

    async def metrics(self, request: Request) -> Response:
        headers, body = render_page(
            self.registry, request.headers.get("accept", ""), request.headers.get("accept-encoding", "")
        )
        return Response(body, headers=headers)

    async def index(self, _request: Request) -> Response:
        return Response(self.page.html, headers=self.page.headers)


def _json(value: dict[str, Any]) -> Response:
    return Response(compact(value), media_type="application/json")


def error_response(error: HttpError) -> Response:
    return Response(error.body(), error.status, dict(error.headers), "application/json")
