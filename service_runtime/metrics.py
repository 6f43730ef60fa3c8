"""The Prometheus endpoint of a service, on its own port and thread.

Must not know: which metrics exist.
"""

import threading
from dataclasses import dataclass
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, start_http_server


@dataclass(frozen=True, slots=True)
class MetricsServer:
    """A running `/metrics` endpoint; `port` is the one bound."""

    server: WSGIServer
    thread: threading.Thread

    @property
    def port(self) -> int:
        return int(self.server.server_port)

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


def start_metrics_server(registry: CollectorRegistry, host: str, port: int) -> MetricsServer:
    """Serves `registry` on `host:port` (0: any free port). Raises OSError when the port is in use."""
    server, thread = start_http_server(port, addr=host, registry=registry)
    return MetricsServer(server, thread)
