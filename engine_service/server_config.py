"""The front process's part of the settings: where it listens, limits of the transport, how it stops.

Must not know: gRPC, how the settings are used.
"""

from dataclasses import dataclass
from pathlib import Path

from engine_service.config import EngineSettings
from service_runtime.tls_files import ServerTlsFiles
from service_runtime.trace_options import NO_TRACES, TraceOptions


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """The front process: addresses, limits of the transport, and how it stops. Times in seconds.

    `vllm_compat_port` None: no facade for gateways. `tls` None: plaintext. `lora_dir`: where adapters
    may be loaded from.
    """

    served_model_name: str
    host: str
    port: int
    metrics_host: str
    metrics_port: int
    vllm_compat_host: str
    vllm_compat_port: int | None
    drain_timeout_s: float
    allow_drain_rpc: bool
    allow_step_dump_rpc: bool
    stalled_step_timeout_s: float
    hung_step_timeout_s: float
    restart_engine: bool
    max_request_bytes: int
    max_unread_tokens: int
    slow_request_s: float
    tls: ServerTlsFiles | None = None
    traces: TraceOptions = NO_TRACES
    lora_dir: Path | None = None
    allow_lora_rpc: bool = False


def server_config(settings: EngineSettings) -> ServerConfig:
    """The front process's part of the settings."""
    return ServerConfig(
        settings.model_name,
        settings.host,
        settings.port,
        settings.metrics_host,
        settings.metrics_port,
        settings.vllm_compat_host,
        settings.vllm_compat_port,
        settings.drain_timeout,
        settings.allow_drain_rpc,
        settings.allow_step_dump_rpc,
        settings.stalled_step_timeout,
        settings.hung_step_timeout,
        settings.restart_engine,
        settings.max_request_bytes,
        settings.max_unread_tokens,
        settings.slow_request_seconds,
        settings.tls,
        settings.traces,
        settings.lora_dir,
        settings.allow_lora_rpc,
    )
