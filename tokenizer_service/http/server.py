"""Runs the ASGI application on uvicorn inside the service's own event loop; its signals stay the service's.

Must not know: the application.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from service_runtime.grpc_server import PortInUse
from tokenizer_service.http.protocol import BoundedProtocol, ConnectionBounds

_DATE_EVERY_S = 1.0
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Leaves signals alone, and waits for its end instead of looking for it ten times a second."""

    def __init__(self, config: uvicorn.Config, bounds: ConnectionBounds, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.ending = asyncio.Event()
        self._bounds = bounds
        self._tls = tls

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        for listener in sockets or ():
            self.servers.append(await self._listen_on(listener))
        self.listening.set()

    async def _listen_on(self, listener: socket.socket) -> asyncio.Server:
        """uvicorn would neither take a context whose certificates change, nor bound the time of a handshake."""
        return await asyncio.get_running_loop().create_server(
            lambda: BoundedProtocol(
                self._bounds, config=self.config, server_state=self.server_state, app_state=self.lifespan.state
            ),
            sock=listener,
            backlog=_BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=None if self._tls is None else self._bounds.header_timeout_s,
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        while not self.ending.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.ending.wait(), _DATE_EVERY_S)


class HttpServer:
    """Bind first, then start; stop ends what still runs after a grace period."""

    def __init__(
        self, app: ASGIApp, bounds: ConnectionBounds, *, keep_alive_s: float, tls: ssl.SSLContext | None = None
    ) -> None:
        # uvicorn tells of every connection; what an operator needs is in our own log lines.
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(keep_alive_s),
            ),
            bounds,
            tls,
        )
        self._socket: socket.socket | None = None
        self._task: asyncio.Task[None] | None = None

    def bind(self, host: str, port: int) -> int:
        """The port (0: any free one). Raises PortInUse."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=False)
        except OSError as error:
            raise PortInUse(f"cannot listen on {address} for HTTP: {error.strerror}") from error
        self._socket.setblocking(False)
        # Inherited by its connections. asyncio sets it only on sockets that name their protocol; without it the first
        # event of a stream waits 40 ms for the acknowledgement of the headers once a client uses its connection again.
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return int(self._socket.getsockname()[1])

    async def start(self) -> None:
        assert self._socket is not None
        self._task = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        await self._server.listening.wait()

    async def stop(self, grace_s: float) -> None:
        """Closes idle connections at once, the others when their answer has ended, all after `grace_s`."""
        if self._task is None:
            if self._socket is not None:
                self._socket.close()
            return
        self._server.ending.set()
        await asyncio.wait([self._task], timeout=grace_s)
        for connection in list(self._server.server_state.connections):
            connection.transport.abort()
        await asyncio.gather(self._task, return_exceptions=True)
