"""Joins the front (asyncio) and the engine (a blocking loop) over a socket pair.

Commands go one way, one message per step the other. Neither side ever waits for the other to read. The same
two ends work between two processes and, for tests and debugging, between two threads.
Must not know: gRPC, torch, what is in a message.
"""

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable

from engine_service.loop.frames import FrameDecoder, encode_frame
from engine_service.loop.messages import StepReport
from engine_service.loop.outbox import Outbox

_READ_BYTES = 256 * 1024
_READS_PER_TAKE = 64
_LAST_WORD_SECONDS = 5.0
_MAX_SLEEP_SECONDS = 86_400.0
DEFAULT_MAX_UNSENT_BYTES = 32 * 1024 * 1024


class FrontGone(Exception):
    """The front closed its end: the engine has nobody to work for."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """The two ends of a mailbox: (front's, engine's)."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)


class EngineMailbox:
    """The engine's end. Used by one thread, but for `wake`. Owns the socket."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._decoder = FrameDecoder()
        self._outbox = Outbox()
        self._unsent = memoryview(b"")
        self._woken, self._waker = socket_pair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)

    def wake(self) -> None:
        """Ends a wait in `take`, or the next one. May be called from any thread, also after `close`."""
        with contextlib.suppress(OSError):  # full: it is awake already; closed: nobody waits
            self._waker.send(b"\0")

    def take(self, *, wait: bool, timeout_s: float | None = None) -> list[object]:
        """The commands that arrived. With `wait`, sleeps until one comes, `timeout_s` passed, output moved or `wake`.

        May return nothing even then; the caller just asks again. Raises FrontGone.
        """
        self._flush()
        commands = self._read()
        if commands or not wait:
            return commands
        self._sleep(timeout_s)
        self._flush()
        return self._read()

    def publish(self, report: StepReport) -> None:
        """Sends a report as soon as the front reads; until then it is merged with later ones. Never waits."""
        self._outbox.add(report)
        self._flush()

    def send_now(self, message: object) -> None:
        """Sends what is unsent and then `message`; waits a few seconds for a front that does not read."""
        report = self._outbox.take()
        frames = bytes(self._unsent) + (encode_frame(report) if report else b"") + encode_frame(message)
        self._unsent = memoryview(b"")
        self._socket.settimeout(_LAST_WORD_SECONDS)
        try:
            self._socket.sendall(frames)
        except OSError as error:
            raise FrontGone("the front does not read") from error
        finally:
            self._socket.setblocking(False)

    def close(self) -> None:
        for end in (self._socket, self._woken, self._waker):
            end.close()

    def _read(self) -> list[object]:
        commands: list[object] = []
        for _ in range(_READS_PER_TAKE):
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            except OSError as error:
                raise FrontGone("the front is gone") from error
            if not data:
                raise FrontGone("the front is gone")
            commands += self._decoder.feed(data)
        return commands

    def _flush(self) -> None:
        while True:
            if not self._unsent:
                report = self._outbox.take()
                if report is None:
                    return
                self._unsent = memoryview(encode_frame(report))
            try:
                sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            except OSError as error:
                raise FrontGone("the front is gone") from error
            self._unsent = self._unsent[sent:]

    def _sleep(self, timeout_s: float | None) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.register(self._woken, select.POLLIN)
        # Rounded up: a deadline must have passed when we wake for it.
        poll.poll(None if timeout_s is None else int(min(max(timeout_s, 0.0), _MAX_SLEEP_SECONDS) * 1000) + 1)
        with contextlib.suppress(BlockingIOError):
            self._woken.recv(_READ_BYTES)


class FrontMailbox(asyncio.Protocol):
    """The front's end, on the event loop. `on_message` and `on_closed` are called there."""

    def __init__(
        self,
        on_message: Callable[[object], None],
        on_closed: Callable[[], None],
        max_unsent_bytes: int = DEFAULT_MAX_UNSENT_BYTES,
    ) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._max_unsent_bytes = max_unsent_bytes
        self._decoder = FrameDecoder()
        self._transport: asyncio.Transport | None = None

    async def connect(self, end: socket.socket) -> None:
        """Takes over the front's end of a socket pair."""
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, command: object, *, always: bool = False) -> bool:
        """Queues a command without waiting. False when the engine takes too little to hold more, or is gone.

        `always` ignores the bound: for commands whose number is bounded by earlier ones, such as aborts.
        """
        if self._transport is None or self._transport.is_closing():
            return False
        frame = encode_frame(command)
        if not always and self._transport.get_write_buffer_size() + len(frame) > self._max_unsent_bytes:
            return False
        self._transport.write(frame)
        return True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for message in self._decoder.feed(data):
            self._on_message(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_closed()
