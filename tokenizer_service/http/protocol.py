"""uvicorn's HTTP connection with the bounds it lacks: connections, size and time of headers, a way to cut it off.

Must not know: the application.
"""

import asyncio
import re
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from tokenizer_service.http.errors import HttpError
from tokenizer_service.http.exchange import ABORT, PEER_NAMES

_LINGER_S = 1.0
_UPGRADE = re.compile(rb"\nupgrade(?=[ \t]*:)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class ConnectionBounds:
    """`header_timeout_s`: from the connection, or the first byte of a later request, to the end of its headers."""

    max_connections: int
    header_timeout_s: float
    max_header_bytes: int = 64 * 1024


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A request that breaks a bound is answered in OpenAI's shape and the connection closed."""

    def __init__(self, bounds: ConnectionBounds, **uvicorn_arguments: Any) -> None:
        super().__init__(**uvicorn_arguments)
        self._bounds = bounds
        self._header_timer: asyncio.TimerHandle | None = None
        self._header_bytes = 0
        self._linger_timer: asyncio.TimerHandle | None = None
        self._is_in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._bounds.max_connections:
            text = f"the limit of {self._bounds.max_connections:,} connections is reached"
            self._refuse(HttpError(503, text, code="service_unavailable", headers={"retry-after": "1"}))
            return
        self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._headers_done()
        if self._linger_timer is not None:
            self._linger_timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._linger_timer is not None or self.transport.is_closing():
            return
        # Headers may come whole, and more of them at once than the bound allows.
        if not self._is_in_body and self._header_bytes + data.find(b"\r\n\r\n") > self._bounds.max_header_bytes:
            self._refuse_headers()
            return
        super().data_received(data if self._is_in_body else _without_upgrade(data))
        if self._header_timer is None:
            return
        self._header_bytes += len(data)
        if self._header_bytes > self._bounds.max_header_bytes:
            self._refuse_headers()

    def _refuse_headers(self) -> None:
        text = f"the headers exceed the limit of {self._bounds.max_header_bytes:,} bytes"
        self._refuse(HttpError(431, text))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        # No server is asked for these extensions but ours. The first ends the connection without sending what is
        # buffered; the second tells who the client is, where it had to show a certificate.
        self.scope["extensions"] = {ABORT: self.transport.abort, PEER_NAMES: self._peer_names}  # type: ignore[dict-item]
        if self._header_timer is None:
            self._await_headers()

    def _peer_names(self) -> list[str]:
        """The names in the client's verified certificate: the alternatives before the common name."""
        certificate = self.transport.get_extra_info("peercert") or {}
        names = [value for kind, value in certificate.get("subjectAltName", ()) if kind in ("DNS", "URI", "email")]
        subject = [pair for part in certificate.get("subject", ()) for pair in part]
        return [*names, *(value for kind, value in subject if kind == "commonName")]

    def on_headers_complete(self) -> None:
        self._headers_done()
        self._is_in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._is_in_body = False
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(HttpError(400, "the request is not valid HTTP/1.1"))

    def _await_headers(self) -> None:
        self._header_bytes = 0
        self._header_timer = self.loop.call_later(self._bounds.header_timeout_s, self._headers_late)

    def _headers_done(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        self._header_bytes = 0

    def _headers_late(self) -> None:
        text = f"the headers did not arrive within {self._bounds.header_timeout_s:g} seconds"
        self._refuse(HttpError(408, text))

    def _refuse(self, error: HttpError) -> None:
        """Answers without the application. In the middle of another answer only closes."""
        self._headers_done()
        if self.cycle is not None and not self.cycle.response_complete:
            self.transport.close()
            return
        body = error.body()
        fields = {
            "content-type": "application/json",
            "content-length": str(len(body)),
            "connection": "close",
            **error.headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
        self.transport.write(STATUS_LINE[error.status] + head.encode() + b"\r\n" + body)
        self._linger()

    def _linger(self) -> None:
        """Closing while the client still sends would reset the connection, and the answer be lost with it."""
        if self.transport.is_closing() or self._linger_timer is not None:
            return
        self._linger_timer = self.loop.call_later(_LINGER_S, self.transport.abort)
        if self.transport.can_write_eof():  # not with TLS: there the lingering alone must do
            self.transport.write_eof()


def _without_upgrade(data: bytes) -> bytes:
    """Clients that would rather speak HTTP/2 offer it in a header; the parser ends at it and loses the body."""
    head, end, rest = data.partition(b"\r\n\r\n")
    return _UPGRADE.sub(b"\nx-upgrade", head) + end + rest
