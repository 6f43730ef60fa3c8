"""One multiplexed session: commands in, one message per engine step out; its end is the end of its requests.

Must not know: how requests are validated, other sessions, how the engine runs.
"""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import grpc
import structlog

from engine_service.api import errors
from engine_service.api.adapter_feed import AdapterFeed
from engine_service.api.convert import load_news_message
from engine_service.api.door import Door
from engine_service.api.engine_handle import Connection, EngineHandle
from engine_service.api.heartbeat import HeartbeatWatch, read_heartbeat
from engine_service.api.live_request import Submission
from engine_service.api.load_news import LoadNews
from engine_service.api.session_outbox import Refused, SessionOutbox
from engine_service.core.outcome import Refusal, RefusalCode
from service_runtime.wire import Malformed
from tokenwire.engine.v1 import engine_pb2

_LAST_WORDS_SECONDS = 0.5
_SESSION_ENDED = Refusal(RefusalCode.CANCELLED, "the session ended")
_CANCELLED = Refusal(RefusalCode.CANCELLED, "cancelled by the client")

Context = grpc.aio.ServicerContext[engine_pb2.SessionRequest, engine_pb2.SessionResponse]


class Session:
    """Serves one Session call: build it, `run` it once."""

    def __init__(
        self,
        context: Context,
        door: Door,
        handle: EngineHandle,
        opened: Callable[[Connection], engine_pb2.SessionOpened],
        open_timeout_s: float,
    ) -> None:
        self._context = context
        self._door = door
        self._handle = handle
        self._opened = opened
        self._open_timeout_s = open_timeout_s
        self._live: dict[int, Submission] = {}
        self._has_news = asyncio.Event()
        self._outbox = SessionOutbox(self._has_news.set, self._forget)
        self._must_say_draining = False
        self._load = LoadNews(handle, self._has_news.set)
        self._adapters = AdapterFeed(handle, self._has_news.set)
        self._tells_load = False
        self._heartbeat = HeartbeatWatch(None)

    async def run(self) -> None:
        """Until the stream or the engine ends; may end the call with a status. Then no request is left."""
        connection = self._handle.connection()
        if isinstance(connection, Refusal):
            await errors.abort(self._context, connection)
        await self._open(connection)
        try:
            refusal = await self._serve(connection)
        finally:
            for submission in self._live.values():
                self._handle.cancel(submission.samples, _SESSION_ENDED)
        if refusal is not None:
            await errors.abort(self._context, refusal)

    async def _open(self, connection: Connection) -> None:
        try:
            async with asyncio.timeout(self._open_timeout_s):
                first = _command(await self._context.read())
        except TimeoutError:
            first = Refusal(RefusalCode.DEADLINE, f"no message came within {self._open_timeout_s:g} s of the call")
        if isinstance(first, Refusal):
            await errors.abort(self._context, first)
        if first is None or first.WhichOneof("command") != "open":
            await errors.abort(
                self._context,
                Refusal(RefusalCode.INVALID, "the first message of a session must be `open`", "open"),
            )
        heartbeat_s = read_heartbeat(first.open)
        if isinstance(heartbeat_s, Refusal):
            await errors.abort(self._context, heartbeat_s)
        self._heartbeat = HeartbeatWatch(heartbeat_s)
        self._tells_load = first.open.tell_load
        await self._context.write(engine_pb2.SessionResponse(opened=self._opened(connection)))

    async def _serve(self, connection: Connection) -> Refusal | None:
        """Until the client ends the stream (None), breaks its rules, is silent or the engine ends (why)."""
        reader = asyncio.create_task(self._read_commands())
        writer = asyncio.create_task(self._write_outputs())
        ended = asyncio.create_task(connection.ended.wait())
        draining = asyncio.create_task(self._watch_draining())
        silent = asyncio.create_task(self._heartbeat.wait_silent())
        try:
            with self._adapters.listening(), self._load.listening() if self._tells_load else nullcontext():
                done, _ = await asyncio.wait({reader, writer, ended, silent}, return_when=asyncio.FIRST_COMPLETED)
            if ended in done:
                await self._write_last_words(writer)
                return connection.reason
            if writer in done:
                writer.result()
            if reader in done:
                return reader.result()
            structlog.get_logger().warning(
                "session_silent", seconds=round(self._heartbeat.limit_s, 3), live_requests=len(self._live)
            )
            return silent.result()
        finally:
            await _end(reader, writer, ended, draining, silent)

    async def _write_last_words(self, writer: asyncio.Task[None]) -> None:
        """Gives the writer a moment to tell how the requests ended."""
        all_written = asyncio.create_task(self._outbox.all_written.wait())
        try:
            await asyncio.wait({writer, all_written}, timeout=_LAST_WORDS_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _end(all_written)

    async def _watch_draining(self) -> None:
        """Lets the writer, the only task that writes, tell the client to submit elsewhere."""
        await self._handle.draining.wait()
        self._must_say_draining = True
        self._has_news.set()

    async def _read_commands(self) -> Refusal | None:
        while True:
            message = _command(await self._context.read())
            if message is None or isinstance(message, Refusal):
                return message
            self._heartbeat.heard()
            if message.WhichOneof("command") is None and not message.ByteSize():
                continue  # a heartbeat; a command that we do not know has bytes
            with self._heartbeat.paused():
                await self._outbox.has_room.wait()
            refusal = self._obey(message)
            if refusal is not None:
                return refusal

    def _obey(self, message: engine_pb2.SessionRequest) -> Refusal | None:
        """Carries a command out; returns what breaks the rules of the stream itself."""
        match message.WhichOneof("command"):
            case "submit":
                return self._submit(message.submit)
            case "cancel":
                self._cancel(message.cancel)
                return None
            case "open":
                return Refusal(RefusalCode.INVALID, "the session is open already", "open")
            case _:
                return Refusal(RefusalCode.INVALID, "a message must hold a submit or a cancel", "command")

    def _submit(self, message: engine_pb2.SubmitRequest) -> Refusal | None:
        handle = message.handle
        if self._outbox.has_open(handle):
            return Refusal(RefusalCode.INVALID, f"handle {handle} is in use", "submit.handle")
        admitted = self._door.admit(
            message.request,
            call_timeout_s=self._context.time_remaining(),
            wake=partial(self._outbox.add, handle),
        )
        if isinstance(admitted, Refusal):
            self._outbox.open(handle, 1)
            self._outbox.add(handle, Refused(len(message.request.prompt_token_ids), admitted))
        else:
            self._outbox.open(handle, len(admitted.samples))
            self._live[handle] = admitted
        return None

    def _cancel(self, message: engine_pb2.CancelRequest) -> None:
        """Handles and samples that have ended, or never were, are no error."""
        submission = self._live.get(message.handle)
        if submission is not None:
            samples = submission.samples
            if message.HasField("index"):
                samples = samples[message.index : message.index + 1]
            self._handle.cancel(samples, _CANCELLED)

    async def _write_outputs(self) -> None:
        while True:
            await self._has_news.wait()
            if self._must_say_draining:
                self._must_say_draining = False
                await self._context.write(engine_pb2.SessionResponse(draining=engine_pb2.EngineDraining()))
            response = engine_pb2.SessionResponse()
            await self._outbox.move_to(response.step)
            if self._outbox.is_empty and not self._must_say_draining:
                self._has_news.clear()
            if response.step.outputs:
                await self._context.write(response)
            # After the outputs, which end the news: what becomes due from here on begins another round.
            load = self._load.take()
            if load is not None:
                await self._context.write(engine_pb2.SessionResponse(load=load_news_message(load)))
            adapters = self._adapters.take()
            if adapters is not None:
                await self._context.write(engine_pb2.SessionResponse(adapters=adapters))
            self._outbox.written()

    def _forget(self, handle: int) -> None:
        self._live.pop(handle, None)


def _command(message: object) -> engine_pb2.SessionRequest | Refusal | None:
    """None at the end of the stream; a refusal for a message that could not be read."""
    if isinstance(message, Malformed):
        return errors.malformed(message)
    return message if isinstance(message, engine_pb2.SessionRequest) else None


async def _end(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
