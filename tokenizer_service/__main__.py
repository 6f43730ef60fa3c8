"""Starts the tokenizer service: the only place that builds its objects.

Must not know: how a request is served.
"""

import asyncio
import os
import random
import socket
import time
import uuid
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import grpc
import structlog
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry

from service_runtime.config import fail, load_settings
from service_runtime.grpc_server import PortInUse, ServiceHealth, bind, channel_options, server_options
from service_runtime.lifecycle import StopSignals
from service_runtime.logs import configure_logging
from service_runtime.metrics import MetricsServer, start_metrics_server
from service_runtime.model_files import ModelNotFound, resolve_model_folder, tokenizer_fingerprint
from service_runtime.process_tuning import keep_start_up_objects
from service_runtime.tls import BadTls, Dialer, LinkTls, ServerTls
from tokenizer_service.api.calls import CallRunner
from tokenizer_service.api.grpc_service import SERVICE_NAME, TokenizerServicer, add_to_server
from tokenizer_service.api.metrics import EngineTokens, TokenizerMetrics
from tokenizer_service.api.operator_service import OPERATOR_SERVICE_NAME, OperatorServicer
from tokenizer_service.api.operator_service import add_to_server as add_operator_service
from tokenizer_service.config import ENV_PREFIX, PROGRAM, TokenizerSettings
from tokenizer_service.engines.choice import Policy
from tokenizer_service.engines.connection import ConnectionLimits, EngineConnection
from tokenizer_service.engines.discovery import DnsDiscovery, Resolve, resolve_host
from tokenizer_service.engines.failover import Failover, FailoverLimits
from tokenizer_service.engines.matching import ModelCheck, TokenizerIdentity
from tokenizer_service.engines.one_model import OneModel
from tokenizer_service.engines.prefix_map import PrefixMap
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.engines.replicas import STATIC, Replicas
from tokenizer_service.engines.retry_budget import BudgetLimits, RetryBudget
from tokenizer_service.engines.router import MAX_MAP_BLOCKS, Router
from tokenizer_service.http.app import HttpParts, build_app
from tokenizer_service.http.exchange import ExchangeLimits
from tokenizer_service.http.generations import Generations
from tokenizer_service.http.json_body import BodyLimits
from tokenizer_service.http.keys import ApiKeys, BadKeys
from tokenizer_service.http.protocol import ConnectionBounds
from tokenizer_service.http.server import HttpServer
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
from tokenizer_service.tenants.tenants_file import BadTenants, table_source
from tokenizer_service.text.errors import TextError
from tokenizer_service.text.prompt import ChatLimits
from tokenizer_service.text.tool_formats import ToolFormat

# What the transport gets to send the last statuses.
_STOP_GRACE_S = 1.0
_MAX_OPERATOR_BYTES = 64 * 1024
_NO_KEYS = ApiKeys()

_log = structlog.get_logger()


class BadEngine(Exception):
    """An address that was given for an engine is none."""


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
    ) -> None:
        """`ask_to_drain` is called for an operator. Raises BadTls, BadEngine and BadTenants."""
        self._settings = settings
        self._model = model
        self._dice = dice
        self._ask_to_drain = ask_to_drain
        self.metrics = TokenizerMetrics(CollectorRegistry())
        self.admission = Admission(settings.max_requests)
        self.quotas = Quotas(asyncio.get_running_loop().time, settings.max_requests)
        self._gate = Gate(table_source(settings.tenants, keys.digests), self.quotas)
        self._runner = CallRunner(self.admission, self.metrics, self._gate)
        self.metrics.tenants.watch(self.quotas.named)
        self.pool = EncodePool(settings.encode_threads, settings.max_queued_encodes)
        self.sessions = LiveSessions()
        self._engines_changed = asyncio.Event()
        self._engines_changed.set()
        self._tls = None if settings.tls is None else ServerTls(settings.tls)
        link_tls = None if settings.engine_tls is None else LinkTls(settings.engine_tls)
        self._dialer = Dialer(channel_options(), link_tls)
        self._prefixes = PrefixMap(MAX_MAP_BLOCKS)
        self._one_model = OneModel()
        self.replicas = self._new_replicas()
        self._discoveries = tuple(
            DnsDiscovery.of(name, settings.engine_dns_interval, resolve, self.replicas.replace)
            for name in settings.engine_dns
        )
        self.router = Router(
            self.replicas.connections,
            policy=Policy(settings.routing),
            prefixes=self._prefixes,
            dice=dice,
            observe=self.metrics.count_routed,
        )
        self._health = ServiceHealth([SERVICE_NAME])
        self._server = grpc.aio.server(options=server_options(settings.max_request_bytes))
        self._operator_server = None if settings.operator_port is None else self._new_operator_server()
        self._tasks: list[asyncio.Task[None]] = []
        self.port = 0
        self.operator_port: int | None = None
        self.http_port: int | None = None
        self._http: HttpServer | None = None
        self._is_draining = False

    def _connection(self, address: str) -> EngineConnection:
        ours = TokenizerIdentity(self._model.fingerprint, self._model.encoder.vocab_size)
        return EngineConnection(
            address=address,
            client_name=f"{socket.gethostname()}:{os.getpid()}",
            check=ModelCheck(ours, self._settings.allow_tokenizer_mismatch),
            limits=ConnectionLimits(hang_timeout_s=self._settings.engine_hang_timeout),
            dialer=self._dialer,
            jitter=self._dice.random,
            on_change=self._engines_changed.set,
            blocks=self._prefixes.new_holder() if self._settings.routing == Policy.PREFIX.value else None,
            one_model=self._one_model,
        )

    def _new_replicas(self) -> Replicas:
        """With the named engines. Raises BadEngine."""
        replicas = Replicas(self._connection, self._engines_changed.set)
        for address in self._settings.named_engines:
            refusal = replicas.add(address, STATIC)
            if refusal is not None:
                raise BadEngine(f"--engine: {refusal.message}")
        return replicas

    def _new_operator_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=server_options(_MAX_OPERATOR_BYTES))
        add_operator_service(OperatorServicer(self.replicas, self.admission, self._ask_to_drain), server)
        reflection.enable_server_reflection([OPERATOR_SERVICE_NAME, reflection.SERVICE_NAME], server)
        return server

    def _texts(self) -> TextService:
        return TextService(
            encoder=self._model.encoder,
            pool=self.pool,
            router=self.router,
            failover=self._failover(),
            read_limits=ReadLimits(max_unread_tokens=self._settings.max_unread_tokens),
            new_seed=lambda: self._dice.getrandbits(63),
            observe_encode=self.metrics.encode_seconds.observe,
        )

    def _failover(self) -> Failover:
        settings = self._settings
        clock = asyncio.get_running_loop().time
        budget = BudgetLimits(settings.failover_share, float(settings.failover_burst))
        limits = FailoverLimits(settings.failover_attempts, settings.failover_wait)
        return Failover(self.router, limits, RetryBudget(budget, clock), self.metrics, self._dice.random)

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
            cors_origins=settings.cors_origin,
        )
        bounds = ConnectionBounds(settings.http_max_connections, settings.http_header_timeout)
        tls = None if self._tls is None else self._tls.ssl_context()
        return HttpServer(build_app(parts), bounds, keep_alive_s=settings.http_keep_alive_timeout, tls=tls)

    @property
    def is_serving(self) -> bool:
        return self.router.num_connected > 0 and not self._is_draining

    def _engine_tokens(self) -> list[EngineTokens]:
        loads = [(replica.address, replica.connection.load) for replica in self.replicas.all()]
        return [EngineTokens(address, load.prompt_tokens, load.cached_tokens) for address, load in loads]

    async def start(self) -> None:
        """Listens and connects to the engines. Raises PortInUse."""
        settings = self._settings
        intake = self._intake()
        add_to_server(self._servicer(intake), self._server)
        await self._health.add_to(self._server)
        self.metrics.watch(
            active_requests=lambda: self.admission.num_active,
            engines_connected=lambda: self.router.num_connected,
            encode_queue=lambda: self.pool.num_queued,
            prefix_map_blocks=lambda: len(self._prefixes),
            engine_tokens=self._engine_tokens,
            breakers=lambda: [(each.address, each.breaker.state.value) for each in self.replicas.connections],
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
        self.replicas.start()
        self._tasks = [asyncio.create_task(discovery.run()) for discovery in self._discoveries]
        self._tasks.append(asyncio.create_task(self._keep_health()))

    async def _keep_health(self) -> None:
        """SERVING only while at least one engine is connected and fits."""
        while True:
            await self._engines_changed.wait()
            self._engines_changed.clear()
            serving = self.is_serving
            if serving != self._health.is_serving:
                await self._health.set_serving(serving)
                _log.info("serving" if serving else "not_serving", engines=self.router.num_connected)

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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.replicas.close()

    async def _stop_operator_server(self) -> None:
        if self._operator_server is not None:
            await self._operator_server.stop(_STOP_GRACE_S)

    async def _stop_http(self) -> None:
        if self._http is not None:
            await self._http.stop(_STOP_GRACE_S)


async def _serve(settings: TokenizerSettings, model: LoadedModel, keys: ApiKeys) -> None:
    signals = StopSignals()
    signals.install()
    app = TokenizerApp(settings, model, random.SystemRandom(), keys, ask_to_drain=signals.ask)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(app.stop)
        keep_start_up_objects()
        await app.start()
        metrics = _start_metrics(settings, app)
        stack.push_async_callback(asyncio.to_thread, metrics.close)
        ports = {"grpc_port": app.port, "http_port": app.http_port, "metrics_port": metrics.port}
        _log.info("listening", **ports | ({"operator_port": app.operator_port} if app.operator_port else {}))
        await signals.wait_graceful()
        await _drain(app, signals, settings.drain_timeout if signals.grace_s is None else signals.grace_s)
    _log.info("stopped")


def _start_metrics(settings: TokenizerSettings, app: TokenizerApp) -> MetricsServer:
    host, port = settings.metrics_host, settings.metrics_port
    try:
        return start_metrics_server(app.metrics.registry, host, port, lambda: app.is_serving)
    except OSError as error:
        raise PortInUse(f"cannot listen on {host}:{port}: {error.strerror}") from error


async def _drain(app: TokenizerApp, signals: StopSignals, timeout_s: float) -> None:
    """Until the work is done, the time is up, or the second signal comes."""
    waits = [asyncio.create_task(app.drain()), asyncio.create_task(signals.wait_immediate())]
    await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    for task in waits:
        task.cancel()
    await asyncio.gather(*waits, return_exceptions=True)


def main() -> None:
    """Entry of `tokenwire-tokenizer`. Exit code 0 after a stop signal, 1 for a start that cannot succeed."""
    settings = load_settings(TokenizerSettings, program=PROGRAM, env_prefix=ENV_PREFIX)
    configure_logging(level=settings.log_level, log_format=settings.log_format, service="tokenizer")
    try:
        keys = ApiKeys.load(settings.api_key, settings.api_key_file)
        model = load_model(resolve_model_folder(settings.model), settings)
        asyncio.run(_serve(settings, model, keys))
    except (BadEngine, BadKeys, BadTenants, BadTls, ModelNotFound, PortInUse) as error:
        fail(PROGRAM, str(error))
    except TextError as error:
        fail(PROGRAM, f"the tokenizer of {settings.model} cannot be used: {error.message}")


if __name__ == "__main__":
    main()
