"""The Prometheus endpoint of a service, on its own port and thread, and observations that wait for it.

Must not know: which metrics exist.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

Item = TypeVar("Item")
MAX_WAITING = 256


class Deferred(Collector, Generic[Item]):
    """Observations of every step and token, given to `observe` when the registry is read or many have gathered.

    Make it before the metrics that `observe` feeds: a registry reads in the order of making. `add` is for one
    thread and costs next to nothing; updating a metric costs microseconds.
    """

    def __init__(self, registry: CollectorRegistry, observe: Callable[[list[Item]], None]) -> None:
        self._observe = observe
        self._waiting: deque[Item] = deque()
        self._lock = threading.Lock()
        registry.register(self)

    def add(self, item: Item) -> None:
        self._waiting.append(item)
        if len(self._waiting) >= MAX_WAITING:
            self.flush()

    def flush(self) -> None:
        """From any thread; what was added before is observed when it returns."""
        with self._lock:
            items = [self._waiting.popleft() for _ in range(len(self._waiting))]
            if items:
                self._observe(items)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        self.flush()
        return ()


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
