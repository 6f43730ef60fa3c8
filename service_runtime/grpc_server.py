"""The gRPC server both services run: options that are part of the wire contract, health, reflection, binding.

Must not know: which services are served.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from service_runtime.tls import ServerTls

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
DEFAULT_MAX_REQUEST_BYTES = 4 * 1024 * 1024
HANDSHAKE_TIMEOUT_MS = 10_000
MAX_PENDING_CALLS = 16_384
"""Calls of a burst that may wait to be looked at; the library's 1,000 to 3,000 end the rest as CANCELLED."""

_KEEPALIVE_FLOOR: list[tuple[str, int]] = [
    # Gateways ping every 30 s; the library's floor of 300 s would end their quiet requests.
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]


def server_options(max_request_bytes: int) -> list[tuple[str, int]]:
    """Options of every server. A port in use is an error, never shared."""
    return [
        ("grpc.max_receive_message_length", max_request_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_TIMEOUT_MS),
        # A burst is ours to queue or to refuse, with a status that says so.
        ("grpc.server.max_pending_requests", MAX_PENDING_CALLS),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_CALLS),
        *_KEEPALIVE_FLOOR,
    ]


def channel_options() -> list[tuple[str, int]]:
    """Options of every channel between our services."""
    return [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # A replica that comes back is found again within seconds.
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.max_reconnect_backoff_ms", 2_000),
    ]


Probe = Callable[[], Awaitable[bool]]
LIVE = "live"


class _HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Finds some names out when it is asked, with Check; Watch is told what the last Check found."""

    def __init__(self, probes: Mapping[str, Probe]) -> None:
        super().__init__()
        self._probes = probes

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        probe = self._probes.get(request.service)
        if probe is not None:
            await self.set(request.service, _status(await probe()))
        return await super().Check(request, context)


def _status(is_good: bool) -> Any:
    return health_pb2.HealthCheckResponse.SERVING if is_good else health_pb2.HealthCheckResponse.NOT_SERVING


class ServiceHealth:
    """`grpc.health.v1` for the whole server ("") and each service by name: NOT_SERVING until told.

    "live" is always SERVING: the process answers. `probes` are more names, found out when they are asked for.
    """

    def __init__(self, service_names: Sequence[str], probes: Mapping[str, Probe] | None = None) -> None:
        self._names = ("", *service_names)
        self._probes = probes or {}
        self._servicer = _HealthServicer(self._probes)
        self.is_serving = False

    async def set_serving(self, is_serving: bool) -> None:
        self.is_serving = is_serving
        for name in self._names:
            await self._servicer.set(name, _status(is_serving))

    async def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        reflection.enable_server_reflection([*self._names[1:], health.SERVICE_NAME, reflection.SERVICE_NAME], server)
        await self.set_serving(False)
        for name in self._probes:
            await self._servicer.set(name, _status(False))
        await self._servicer.set(LIVE, _status(True))


class PortInUse(Exception):
    """The address cannot be bound."""


def bind(server: grpc.aio.Server, host: str, port: int, tls: ServerTls | None = None) -> int:
    """Binds `host:port` (port 0: any free one) and returns the port. Plaintext without `tls`.

    Raises PortInUse.
    """
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    refusal = PortInUse(f"cannot listen on {address}: the port is in use or the address is not ours")
    try:
        if tls is None:
            bound = server.add_insecure_port(address)
        else:
            bound = server.add_secure_port(address, tls.grpc_credentials())
    except RuntimeError as error:
        raise refusal from error
    if bound == 0:
        raise refusal
    return bound
