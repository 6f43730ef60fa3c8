"""The running tokenizer service: all of its objects, built and wired; start, drain, stop.

With `__main__` and `fleet` a place that builds objects. Must not know: how a request is served.
"""

import asyncio
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import grpc
import structlog
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from service_runtime.grpc_server import ServiceHealth, bind, server_options
from service_runtime.model_files import tokenizer_fingerprint
from service_runtime.slow_requests import SlowRequests
from service_runtime.tls import ServerTls
from service_runtime.tracing import NO_TRACER, Tracer
from tokenizer_service.api.adapter_operator import AdapterOperator
from tokenizer_service.api.call_trace import CallTraces
from tokenizer_service.api.calls import CallRunner
from tokenizer_service.api.grpc_service import SERVICE_NAME, TokenizerServicer, add_to_server
from tokenizer_service.api.metrics import TokenizerMetrics
from tokenizer_service.api.operator_service import OPERATOR_SERVICE_NAME, OperatorServicer
from tokenizer_service.api.operator_service import add_to_server as add_operator_service
from tokenizer_service.api.status import StatusReader
from tokenizer_service.config import TokenizerSettings
from tokenizer_service.engines.figures import FigureReader
from tokenizer_service.engines.matching import TokenizerIdentity
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.fleet import EngineFleet
from tokenizer_service.http.app import HttpParts, build_app
from tokenizer_service.http.exchange import ExchangeLimits
from tokenizer_service.http.generations import Generations
from tokenizer_service.http.json_body import BodyLimits
from tokenizer_service.http.keys import ApiKeys
from tokenizer_service.http.protocol import ConnectionBounds
from tokenizer_service.http.server import HttpServer
from tokenizer_service.routing.discovery import Resolve, resolve_host
from tokenizer_service.sessions.admission import Admission
from tokenizer_service.sessions.conversation_rules import MAX_MESSAGES
from tokenizer_service.sessions.encode_pool import EncodePool
from tokenizer_service.sessions.intake import Intake
from tokenizer_service.sessions.live import LiveSessions
from tokenizer_service.sessions.prompt_text import PromptEncoder
from tokenizer_service.sessions.session import ReadLimits
from tokenizer_service.sessions.text_service import TextService
from tokenizer_service.tenants.gate import Gate
from tokenizer_service.tenants.quota import Quotas
from tokenizer_service.tenants.tenants_file import table_source
from tokenizer_service.text.prompt import ChatLimits
from tokenizer_service.text.tool_formats import ToolFormat

# What the transport gets to send the last statuses.
_STOP_GRACE_S = 1.0
_MAX_OPERATOR_BYTES = 64 * 1024
_NO_KEYS = ApiKeys()

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """The served model as far as text is concerned."""

    encoder: PromptEncoder
    fingerprint: str


def load_model(folder: Path, settings: TokenizerSettings) -> LoadedModel:
    """Raises TextError when the folder's tokenizer or chat template cannot be used."""
    limits = ChatLimits(max_messages=MAX_MESSAGES, max_chars=4 * settings.max_request_bytes)
    chosen = settings.tool_call_format
    tool_format = None if chosen == "auto" else ToolFormat(chosen)
    encoder = PromptEncoder.load(folder, limits, tool_format=tool_format)
    return LoadedModel(encoder, tokenizer_fingerprint(folder))


class TokenizerApp:
    """All objects of one running service. Build it inside the event loop; then start, wait, stop."""

    def __init__(
        self,
        settings: TokenizerSettings,
        model: LoadedModel,
        dice: random.Random,
        keys: ApiKeys = _NO_KEYS,
        *,
        resolve: Resolve = resolve_host,
        ask_to_drain: Callable[[float | None], None] = lambda grace_s: None,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """`ask_to_drain` is called for an operator; `tracer` stays the caller's to close. Raises BadTls, BadEngine and
        BadTenants.
        """
        self._settings = settings
        self._model = model
        self._dice = dice
        self._ask_to_drain = ask_to_drain
        self.metrics = TokenizerMetrics(
            CollectorRegistry(), model_name=settings.model_name, version=version("tokenwire")
        )
        self.admission = Admission(settings.max_requests)
        self.quotas = Quotas(asyncio.get_running_loop().time, settings.max_requests)
        self._gate = Gate(table_source(settings.tenants, keys.digests), self.quotas)
        slow = SlowRequests(settings.slow_request_seconds, asyncio.get_running_loop().time)
        self._tracer = tracer
        traces = CallTraces(tracer, settings.model_name)
        self._runner = CallRunner(self.admission, self.metrics, self._gate, self._new_id, slow, traces)
        self.metrics.tenants.watch(self.quotas.named)
        self.pool = EncodePool(settings.encode_threads, settings.max_queued_encodes)
        self.sessions = LiveSessions()
        self._engines_changed = asyncio.Event()
        self._engines_changed.set()
        self._tls = None if settings.tls is None else ServerTls(settings.tls)
        self.fleet = EngineFleet(
            settings,
            TokenizerIdentity(model.fingerprint, model.encoder.vocab_size),
            dice,
            resolve=resolve,
            on_change=self._engines_changed.set,
            metrics=self.metrics,
        )
        self._health = ServiceHealth([SERVICE_NAME])
        self._server = grpc.aio.server(options=server_options(settings.max_request_bytes))
        self._operator_server = None if settings.operator_port is None else self._new_operator_server()
        self._health_task: asyncio.Task[None] | None = None
        self.port = 0
        self.operator_port: int | None = None
        self.http_port: int | None = None
        self._http: HttpServer | None = None
        self._is_draining = False

    def _new_operator_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=server_options(_MAX_OPERATOR_BYTES))
        replicas = self.fleet.replicas
        adapters = AdapterOperator(replicas, self._settings.model_name)
        servicer = OperatorServicer(replicas, self.admission, self._ask_to_drain, self._status_reader(), adapters)
        add_operator_service(servicer, server)
        reflection.enable_server_reflection([OPERATOR_SERVICE_NAME, reflection.SERVICE_NAME], server)
        return server

    def _status_reader(self) -> StatusReader:
        return StatusReader(
            model_name=self._settings.model_name,
            max_requests=self._settings.max_requests,
            started=asyncio.get_running_loop().time(),
            replicas=self.fleet.replicas,
            admission=self.admission,
            calls=self._runner.live,
            registry=self.metrics.registry,
            encode_queue=lambda: self.pool.num_queued,
            figures=FigureReader(),
        )

    def _texts(self) -> TextService:
        return TextService(
            encoder=self._model.encoder,
            pool=self.pool,
            router=self.fleet.router,
            failover=self.fleet.failover,
            read_limits=ReadLimits(max_unread_tokens=self._settings.max_unread_tokens),
            new_seed=lambda: self._dice.getrandbits(63),
            observe_encode=self.metrics.generations.encode.observe,
        )

    def _new_id(self) -> str:
        return str(uuid.UUID(int=self._dice.getrandbits(128), version=4))

    def _intake(self) -> Intake:
        return Intake(
            texts=self._texts(),
            admission=self.admission,
            quotas=self.quotas,
            sessions=self.sessions,
            model_name=self._settings.model_name,
            new_id=self._new_id,
            allow_chat_template=self._settings.allow_chat_template_override,
        )

    def _servicer(self, intake: Intake) -> TokenizerServicer:
        return TokenizerServicer(self._runner, intake, self._model.fingerprint)

    def _http_server(self, intake: Intake) -> HttpServer:
        settings = self._settings
        generations = Generations(self._runner, intake)
        parts = HttpParts(
            generations=generations,
            registry=self.metrics.registry,
            is_ready=lambda: self.is_serving,
            clock=time.time,
            limits=ExchangeLimits(
                BodyLimits(settings.max_request_bytes, settings.http_body_timeout), settings.http_write_timeout
            ),
            gate=self._gate,
            tracer=self._tracer,
            cors_origins=settings.cors_origin,
        )
        bounds = ConnectionBounds(settings.http_max_connections, settings.http_header_timeout)
        tls = None if self._tls is None else self._tls.ssl_context()
        return HttpServer(build_app(parts), bounds, keep_alive_s=settings.http_keep_alive_timeout, tls=tls)

    @property
    def is_serving(self) -> bool:
        return self.fleet.router.num_connected > 0 and not self._is_draining

    async def start(self) -> None:
        """Listens and connects to the engines. Raises PortInUse."""
        settings = self._settings
        intake = self._intake()
        add_to_server(self._servicer(intake), self._server)
        await self._health.add_to(self._server)
        self.metrics.watch(
            active_requests=lambda: self.admission.num_active,
            engines_connected=lambda: self.fleet.router.num_connected,
            encode_queue=lambda: self.pool.num_queued,
            prefix_map_blocks=lambda: len(self.fleet.prefixes),
            engines=self.fleet.figures,
        )
        self.port = bind(self._server, settings.host, settings.port, self._tls)
        if self._operator_server is not None and settings.operator_port is not None:
            self.operator_port = bind(self._operator_server, settings.operator_host, settings.operator_port, self._tls)
            await self._operator_server.start()
        if settings.http:
            self._http = self._http_server(intake)
            self.http_port = self._http.bind(settings.http_host, settings.http_port)
            await self._http.start()
        await self._server.start()
        self.fleet.start()
        self._health_task = asyncio.create_task(self._keep_health())

    async def _keep_health(self) -> None:
        """SERVING only while at least one engine is connected and fits."""
        while True:
            await self._engines_changed.wait()
            self._engines_changed.clear()
            serving = self.is_serving
            if serving != self._health.is_serving:
                await self._health.set_serving(serving)
                _log.info("serving" if serving else "not_serving", engines=self.fleet.router.num_connected)

    async def drain(self) -> None:
        """Refuses new work, waits until the running work is done."""
        self._is_draining = True
        self._engines_changed.set()
        await self._health.set_serving(False)
        self.admission.drain()
        _log.info("draining", active_requests=self.admission.num_active)
        await self.admission.wait_idle()

    async def stop(self) -> None:
        """Ends what still runs with UNAVAILABLE, then everything else."""
        gone = Refusal(RefusalCode.UNAVAILABLE, "the service is shutting down", retry_after_s=1.0)
        self.admission.drain()
        self.sessions.fail_all(gone)
        await asyncio.to_thread(self.pool.close)
        await asyncio.gather(self._server.stop(_STOP_GRACE_S), self._stop_http(), self._stop_operator_server())
        if self._health_task is not None:
            self._health_task.cancel()
            await asyncio.gather(self._health_task, return_exceptions=True)
        await self.fleet.close()

    async def _stop_operator_server(self) -> None:
        if self._operator_server is not None:
            await self._operator_server.stop(_STOP_GRACE_S)

    async def _stop_http(self) -> None:
        if self._http is not None:
            await self._http.stop(_STOP_GRACE_S)
