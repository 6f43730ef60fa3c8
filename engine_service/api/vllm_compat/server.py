"""The facade's own server: one port more, with the options that gateways need.

Must not know: how requests are served.
"""

from collections.abc import Callable

import grpc

from engine_service.api.door import Door
from engine_service.api.engine_handle import EngineHandle
from engine_service.api.vllm_compat.service import VllmEngineService, add_to_server
from service_runtime.grpc_server import bind, server_options
from service_runtime.tls import ServerTls


def build_facade(
    *,
    door: Door,
    handle: EngineHandle,
    model_name: str,
    engine_version: str,
    clock: Callable[[], float],
    host: str,
    port: int,
    max_request_bytes: int,
    tls: ServerTls | None = None,
) -> tuple[grpc.aio.Server, int]:
    """The bound server, not started yet, and its port. Raises PortInUse. `clock` is in seconds."""
    server = grpc.aio.server(options=server_options(max_request_bytes))
    service = VllmEngineService(
        door=door, handle=handle, model_name=model_name, engine_version=engine_version, clock=clock
    )
    add_to_server(service, server)
    return server, bind(server, host, port, tls)
