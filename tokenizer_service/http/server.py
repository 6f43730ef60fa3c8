"""Runs the ASGI application on uvicorn inside the service's own event loop; its signals stay the service's.

Must not know: the application.
"""

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from service_runtime.grpc_server import PortInUse
from tokenizer_service.http.protocol import BoundedProtocol, ConnectionBounds

_DATE_EVERY_S = 1.0
_BACKLOG = 2048


class _Server(uvicorn.Server):
    """Leaves signals alone, and waits for its end instead of looking for it ten times a second."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.ending = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

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

    def __init__(self, app: ASGIApp, bounds: ConnectionBounds, *, keep_alive_s: float) -> None:
        # uvicorn tells of every connection; what an operator needs is in our own log lines.
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
        self._server = _Server(
            uvicorn.Config(
                app,
                http=partial(BoundedProtocol, bounds),  # type: ignore[arg-type]  # called like a class
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(keep_alive_s),
            )
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
