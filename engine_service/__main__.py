"""`tokenwire-engine`: builds the front process of the engine service and runs it.

Together with `engine_main` and `build_engine` the only place that builds objects. Never imports torch: that is
the engine process's, which is started from here.
"""

import asyncio
import os
import random
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from typing import Any

import grpc
import structlog
from prometheus_client import CollectorRegistry

from engine_service.api.adapter_loader import AdapterLoader
from engine_service.api.door import Door
from engine_service.api.engine_handle import EngineHandle
from engine_service.api.engine_metrics import EngineMetrics
from engine_service.api.front import Front
from engine_service.api.grpc_service import SERVICE_NAME, EngineService, add_to_server
from engine_service.api.request_trace import RequestTraces
from engine_service.api.supervisor import EngineSupervisor
from engine_service.api.vitals import VitalLimits, Vitals
from engine_service.api.watchdog import Watchdog
from engine_service.config import ENV_PREFIX, PROGRAM, EngineSettings
from engine_service.engine_config import EngineConfig, engine_config
from engine_service.loop.engine_process import engine_environment, launch_process
from engine_service.server_config import ServerConfig, server_config
from service_runtime.config import fail, load_settings
from service_runtime.grpc_server import PortInUse, ServiceHealth, bind, server_options
from service_runtime.lifecycle import StopSignals
from service_runtime.logs import configure_logging
from service_runtime.metrics import start_metrics_server
from service_runtime.process_tuning import keep_start_up_objects
from service_runtime.slow_requests import SlowRequests
from service_runtime.tls import BadTls, ServerTls
from service_runtime.tracing import TracingExtraMissing, start_tracer

_ENGINE_MODULE = "engine_service.engine_main"


def main() -> None:
    """Exit status: 0 after a stop that was asked for, 1 when the engine cannot serve, 2 for bad settings."""
    settings = load_settings(EngineSettings, program=PROGRAM, env_prefix=ENV_PREFIX)
    configure_logging(level=settings.log_level, log_format=settings.log_format, service="engine-front")
    message = asyncio.run(serve(engine_config(settings), server_config(settings)))
    if message is not None:
        fail(PROGRAM, message)


async def serve(engine: EngineConfig, server: ServerConfig) -> str | None:
    """Serves until a stop signal (None) or until the engine is gone for good (why)."""
    signals = StopSignals()
    signals.install()
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, model_name=server.served_model_name, version=version("tokenwire"))
    try:
        tracer = start_tracer(server.traces, service=PROGRAM, version=version("tokenwire"))
    except TracingExtraMissing as error:
        return str(error)
    handle = EngineHandle(
        metrics=metrics,
        clock=time.monotonic,
        max_unread_tokens=server.max_unread_tokens,
        slow=SlowRequests(server.slow_request_s, time.monotonic),
    )
    vitals = Vitals(handle, VitalLimits(server.stalled_step_timeout_s), partial(secrets.token_hex, 16))
    health = ServiceHealth([SERVICE_NAME], {"loop": vitals.loop_moves, "model": vitals.model_answers})
    grpc_server = grpc.aio.server(options=server_options(server.max_request_bytes))
    door = _door(handle, metrics, RequestTraces(tracer, time.monotonic, server.served_model_name))
    service = _add_service(grpc_server, server, handle, door, signals)
    metrics.watch(stalled_s=lambda: vitals.stalled_s, sessions=lambda: service.num_sessions)
    await health.add_to(grpc_server)
    try:
        tls = None if server.tls is None else ServerTls(server.tls)
        facade = _facade(server, handle, door, tls)
        metrics_server = start_metrics_server(
            registry, server.metrics_host, server.metrics_port, lambda: health.is_serving
        )
        await _listen(grpc_server, facade, server, metrics_server.port, tls)
    except (PortInUse, OSError, GatewayExtraMissing, BadTls) as error:
        return _why_not_listening(error, server)
    supervisor = EngineSupervisor(
        launch=partial(launch_process, _ENGINE_MODULE, engine_environment(os.environ, engine.model.threads)),
        config=engine,
        handle=handle,
        set_serving=health.set_serving,
        restart=server.restart_engine,
    )
    front = Front(
        servers=[grpc_server] if facade is None else [grpc_server, facade.server],
        set_serving=health.set_serving,
        handle=handle,
        supervisor=supervisor,
        signals=signals,
        drain_timeout_s=server.drain_timeout_s,
        watch=_watch(server.hung_step_timeout_s, vitals, health, supervisor),
    )
    keep_start_up_objects()
    try:
        return await front.run()
    finally:
        metrics_server.close()
        tracer.close()


def _watch(
    timeout_s: float, vitals: Vitals, health: ServiceHealth, supervisor: EngineSupervisor
) -> Callable[[], Coroutine[Any, Any, None]] | None:
    if timeout_s == 0:
        return None
    return Watchdog(vitals, timeout_s=timeout_s, set_serving=health.set_serving, end_engine=supervisor.end_hung).run


class GatewayExtraMissing(Exception):
    """The packages of the facade for gateways are not installed."""


@dataclass(frozen=True, slots=True)
class _Facade:
    server: grpc.aio.Server
    port: int


def _door(handle: EngineHandle, metrics: EngineMetrics, traces: RequestTraces) -> Door:
    randomness = random.SystemRandom()
    return Door(
        handle,
        metrics,
        draw_seed=partial(randomness.getrandbits, 63),
        draw_name=partial(secrets.token_hex, 16),
        traces=traces,
    )


def _add_service(
    grpc_server: grpc.aio.Server, server: ServerConfig, handle: EngineHandle, door: Door, signals: StopSignals
) -> EngineService:
    service = EngineService(
        door=door,
        handle=handle,
        model_name=server.served_model_name,
        engine_version=version("tokenwire"),
        clock=time.monotonic,
        ask_to_drain=signals.ask if server.allow_drain_rpc else None,
        allow_step_dumps=server.allow_step_dump_rpc,
        loader=_adapter_loader(server, handle),
    )
    add_to_server(service, grpc_server)
    return service


def _adapter_loader(server: ServerConfig, handle: EngineHandle) -> AdapterLoader | None:
    """None where calls may not."""
    if not server.allow_lora_rpc or server.lora_dir is None:
        return None
    return AdapterLoader(handle.adapter_calls, server.lora_dir, server.served_model_name)


def _facade(server: ServerConfig, handle: EngineHandle, door: Door, tls: ServerTls | None) -> _Facade | None:
    """None when it is off. Its packages are imported only here. Raises GatewayExtraMissing, PortInUse."""
    if server.vllm_compat_port is None:
        return None
    try:
        from engine_service.api.vllm_compat.server import build_facade
    except ModuleNotFoundError as error:
        raise GatewayExtraMissing(
            f"--vllm-compat-port needs the package {error.name}: install tokenwire[gateway]"
        ) from error
    facade, port = build_facade(
        door=door,
        handle=handle,
        model_name=server.served_model_name,
        engine_version=version("tokenwire"),
        clock=time.monotonic,
        host=server.vllm_compat_host,
        port=server.vllm_compat_port,
        max_request_bytes=server.max_request_bytes,
        tls=tls,
    )
    return _Facade(facade, port)


async def _listen(
    grpc_server: grpc.aio.Server,
    facade: _Facade | None,
    server: ServerConfig,
    metrics_port: int,
    tls: ServerTls | None,
) -> None:
    grpc_port = bind(grpc_server, server.host, server.port, tls)
    await grpc_server.start()
    ports = {"grpc_port": grpc_port, "metrics_port": metrics_port}
    if facade is not None:
        await facade.server.start()
        ports["vllm_compat_port"] = facade.port
    structlog.get_logger().info("listening", **ports)


def _why_not_listening(error: Exception, server: ServerConfig) -> str:
    if isinstance(error, PortInUse | GatewayExtraMissing | BadTls):
        return str(error)
    return (
        f"cannot serve metrics on {server.metrics_host}:{server.metrics_port}: "
        "the port is in use or the address is not ours"
    )


if __name__ == "__main__":
    main()
