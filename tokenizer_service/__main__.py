"""Entry point of the tokenizer service: settings in, a running service, a stop as it was asked for.

Must not know: how a request is served.
"""

import asyncio
import random
import time
from contextlib import AsyncExitStack
from importlib.metadata import version

import structlog

from service_runtime.config import fail, load_settings
from service_runtime.grpc_server import PortInUse
from service_runtime.lifecycle import StopSignals
from service_runtime.logs import configure_logging
from service_runtime.metrics import MetricsServer, start_metrics_server
from service_runtime.model_files import ModelNotFound, resolve_model_folder
from service_runtime.process_tuning import keep_start_up_objects
from service_runtime.tls import BadTls
from service_runtime.tracing import TracingExtraMissing, start_tracer
from tokenizer_service.app import LoadedModel, TokenizerApp, load_model
from tokenizer_service.config import ENV_PREFIX, PROGRAM, TokenizerSettings
from tokenizer_service.fleet import BadEngine
from tokenizer_service.http.keys import ApiKeys, BadKeys
from tokenizer_service.tenants.tenants_file import BadTenants
from tokenizer_service.text.errors import TextError

_log = structlog.get_logger()


async def _serve(settings: TokenizerSettings, model: LoadedModel, keys: ApiKeys, began: float) -> None:
    signals = StopSignals()
    signals.install()
    tracer = start_tracer(settings.traces, service=PROGRAM, version=version("tokenwire"))
    app = TokenizerApp(settings, model, random.SystemRandom(), keys, ask_to_drain=signals.ask, tracer=tracer)
    async with AsyncExitStack() as stack:
        stack.callback(tracer.close)
        stack.push_async_callback(app.stop)
        keep_start_up_objects()
        await app.start()
        metrics = _start_metrics(settings, app)
        stack.push_async_callback(asyncio.to_thread, metrics.close)
        ports = {"grpc_port": app.port, "http_port": app.http_port, "metrics_port": metrics.port}
        _log.info("listening", **ports | ({"operator_port": app.operator_port} if app.operator_port else {}))
        app.metrics.started(time.monotonic() - began)
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
    began = time.monotonic()
    settings = load_settings(TokenizerSettings, program=PROGRAM, env_prefix=ENV_PREFIX)
    configure_logging(level=settings.log_level, log_format=settings.log_format, service="tokenizer")
    try:
        keys = ApiKeys.load(settings.api_key, settings.api_key_file)
        model = load_model(resolve_model_folder(settings.model), settings)
        asyncio.run(_serve(settings, model, keys, began))
    except (BadEngine, BadKeys, BadTenants, BadTls, ModelNotFound, PortInUse, TracingExtraMissing) as error:
        fail(PROGRAM, str(error))
    except TextError as error:
        fail(PROGRAM, f"the tokenizer of {settings.model} cannot be used: {error.message}")


if __name__ == "__main__":
    main()
