"""The page equals the library's own, for every reader; the port answers nothing but its three paths."""

import gzip
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, exposition
from prometheus_client.openmetrics import exposition as openmetrics

from service_runtime import metrics
from service_runtime.metrics import start_metrics_server
from service_runtime.metrics_page import render_page

PROMETHEUS_2 = "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,*/*;q=0.1"
PROMETHEUS_3 = "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,text/plain;version=0.0.4;q=0.3"


@pytest.fixture
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    tokens = Counter("tokens", "Tokens, by tenant \\ and\nkind.", ["tenant"], registry=made)
    tokens.labels('quo"ted \\ and\nbroken, \u00fc').inc(3)
    Gauge("share", "A share.", registry=made).set(0.25)
    seconds = Histogram("wait_seconds", "Time.", unit="seconds", buckets=(0.1, 1.0), registry=made)
    seconds.observe(0.5, exemplar={"trace_id": "ab" * 16})
    return made


@pytest.mark.parametrize("accept", [PROMETHEUS_2, PROMETHEUS_3, "Application/OpenMetrics-Text"])
def test_open_metrics_are_the_librarys(registry: CollectorRegistry, accept: str) -> None:
    headers, body = render_page(registry, accept)
    assert headers == {"content-type": "application/openmetrics-text; version=1.0.0; charset=utf-8"}
    assert body == openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
    assert b"trace_id" in body


@pytest.mark.parametrize("accept", ["", "*/*", "text/plain;version=0.0.4", "text/html"])
def test_the_older_text_is_the_librarys(registry: CollectorRegistry, accept: str) -> None:
    headers, body = render_page(registry, accept)
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    assert body == exposition.generate_latest(registry)


def test_it_is_compressed_for_who_can_read_that(registry: CollectorRegistry) -> None:
    headers, body = render_page(registry, PROMETHEUS_3, "deflate, gzip;q=0.8")
    assert headers["content-encoding"] == "gzip"
    assert gzip.decompress(body) == openmetrics.generate_latest(registry)  # type: ignore[no-untyped-call]
    assert "content-encoding" not in render_page(registry, PROMETHEUS_3, "identity")[0]


def test_names_choose_series(registry: CollectorRegistry) -> None:
    _, body = render_page(registry, names=["share"])
    assert b"share 0.25" in body
    assert b"tokens" not in body


@pytest.fixture
def url(registry: CollectorRegistry) -> Iterator[str]:
    server = start_metrics_server(registry, "127.0.0.1", 0, lambda: False)
    yield f"http://127.0.0.1:{server.port}"
    server.close()


def status_of(url: str, method: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method=method)) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


@pytest.mark.parametrize(
    ("path", "method", "status"),
    [
        ("/metrics", "GET", 200),
        ("/livez", "GET", 200),
        ("/readyz", "GET", 503),
        ("/", "GET", 404),
        ("/metrics/../etc/passwd", "GET", 404),
        ("/metrics", "POST", 405),
    ],
)
def test_the_port_has_three_paths(url: str, path: str, method: str, status: int) -> None:
    assert status_of(url + path, method)[0] == status


def test_a_reader_may_choose_series_by_name(url: str) -> None:
    _, page = status_of(url + "/metrics?name[]=share", "GET")
    assert "share 0.25" in page
    assert "tokens" not in page


def test_clients_that_say_nothing_or_leave_write_no_traceback(
    registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(metrics._Handler, "timeout", 0.1)
    server = start_metrics_server(registry, "127.0.0.1", 0, lambda: True)
    try:
        with socket.create_connection(("127.0.0.1", server.port)) as silent:
            silent.settimeout(30)
            assert silent.recv(1) == b""  # it is the server that gives up
        with socket.create_connection(("127.0.0.1", server.port)) as gone:
            # A reset, not an end.
            gone.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            gone.sendall(b"GET")
    finally:
        server.close()
    assert capfd.readouterr().err == ""
