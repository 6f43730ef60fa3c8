"""The HTTP port for what watches a service: /metrics, /livez and /readyz; and what the metrics of both are made with.

Must not know: which metrics exist, when a service is ready.
"""

import contextlib
import platform
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Info,
    Metric,
    ProcessCollector,
    disable_created_metrics,
    start_http_server,
)
from prometheus_client.registry import Collector

from service_runtime.metrics_page import render_page

Item = TypeVar("Item")
OTHER = "other"
MAX_WAITING = 256
_WATCHER_TIMEOUT_S = 10.0


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


class BoundedLabel:
    """Values of a label that clients or operators choose: past `most` of them every further one is "other"."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[str] = set()

    def of(self, value: str) -> str:
        if value not in self._known:
            if not value or len(self._known) >= self._most:
                return OTHER
            self._known.add(value)
        return value


def show_process(registry: CollectorRegistry, prefix: str, version: str, **labels: str) -> None:
    """Which program this is, with more labels, and what its process uses (`process_...`)."""
    build = Info(f"{prefix}_build", "Version of the service and of Python.", registry=registry)
    build.info({"version": version, "python_version": platform.python_version(), **labels})
    ProcessCollector(registry=registry)


def seconds_buckets(least: float, most: float) -> tuple[float, ...]:
    """1, 2.5 and 5 of each power of ten between the two."""
    steps = (digit * 10.0**power for power in range(-6, 6) for digit in (1.0, 2.5, 5.0))
    return tuple(float(f"{step:.2g}") for step in steps if least <= step * 1.001 and step <= most * 1.001)


def powers_of_two(most: int) -> tuple[int, ...]:
    """Buckets for counts of tokens and requests."""
    return tuple(2**power for power in range(most.bit_length()))


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


class _Handler(WSGIRequestHandler):
    """Writes no log, and does not wait for ever for a request."""

    timeout = _WATCHER_TIMEOUT_S

    def handle(self) -> None:
        """A client that says nothing, or leaves, is no event: the library would write a traceback for each."""
        with contextlib.suppress(OSError):
            super().handle()

    def log_message(self, format: str, *args: object) -> None:
        return


def start_metrics_server(
    registry: CollectorRegistry, host: str, port: int, is_ready: Callable[[], bool]
) -> MetricsServer:
    """Serves `registry` on `host:port` (0: any free port). Raises OSError when the port is in use.

    `is_ready` is asked from other threads. Whoever asks for OpenMetrics gets it, exemplars included.
    """
    # Beside each series one of when it began, that nobody reads.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    server, thread = start_http_server(port, addr=host, registry=registry)
    server.RequestHandlerClass = _Handler
    server.set_app(_watched(registry, is_ready))
    return MetricsServer(server, thread)


def _watched(registry: CollectorRegistry, is_ready: Callable[[], bool]) -> Callable[..., Any]:
    """`/livez`: the process answers. `/readyz`: 200 while new requests are taken, else 503. `/metrics`: the page."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        status, headers, body = _answer(environ, registry, is_ready)
        start_response(status, list(headers.items()))
        return [body]

    return answer


def _answer(
    environ: dict[str, Any], registry: CollectorRegistry, is_ready: Callable[[], bool]
) -> tuple[str, dict[str, str], bytes]:
    path, plain = environ["PATH_INFO"], {"content-type": "text/plain"}
    if environ["REQUEST_METHOD"] != "GET":
        return "405 Method Not Allowed", plain | {"allow": "GET"}, b"GET only\n"
    if path == "/metrics":
        names = parse_qs(environ.get("QUERY_STRING", "")).get("name[]", [])
        accept, encoding = environ.get("HTTP_ACCEPT", ""), environ.get("HTTP_ACCEPT_ENCODING", "")
        return "200 OK", *render_page(registry, accept, encoding, names)
    if path not in ("/livez", "/readyz"):
        return "404 Not Found", plain, b"/metrics, /livez or /readyz\n"
    is_good = path == "/livez" or is_ready()
    return ("200 OK", plain, b"ok\n") if is_good else ("503 Service Unavailable", plain, b"not ready\n")
