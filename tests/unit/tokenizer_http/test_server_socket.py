"""The sockets of the HTTP server: small writes leave at once."""

import asyncio
import socket

import pytest

from tokenizer_service.http.protocol import ConnectionBounds
from tokenizer_service.http.server import HttpServer


@pytest.mark.parametrize("bound_to", ["127.0.0.1", "::1"])
async def test_the_first_event_does_not_wait_for_the_acknowledgement_of_the_headers(bound_to: str) -> None:
    """Nagle's algorithm is off on the server's side of every connection."""
    seen: list[int] = []

    async def app(scope: object, receive: object, send: object) -> None:
        """Never asked."""

    class Watched(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connection = transport.get_extra_info("socket")
            seen.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            transport.close()

    server = HttpServer(app, ConnectionBounds(8, 5.0), keep_alive_s=5.0)  # type: ignore[arg-type]
    port = server.bind(bound_to, 0)
    listener = server._socket
    assert listener is not None
    async with await asyncio.get_running_loop().create_server(Watched, sock=listener):
        reader, writer = await asyncio.open_connection(bound_to, port)
        assert await reader.read() == b""
        writer.close()
    assert seen != [0]
    assert len(seen) == 1
