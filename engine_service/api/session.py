"""One multiplexed session: commands in, one message per engine step out; its end is the end of its requests.

Must not know: how requests are validated, other sessions, how the engine runs.
"""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, Protocol

import grpc
import structlog

from engine_service.api import errors
from engine_service.api.adapter_feed import AdapterFeed
from engine_service.api.admission import Door
from engine_service.api.convert import add_prompt_logprobs, load_news_message, request_output
from engine_service.api.engine_handle import Connection, EngineHandle
from engine_service.api.heartbeat import HeartbeatWatch, read_heartbeat
from engine_service.api.live_request import Submission, Unread
from engine_service.api.load_news import LoadNews
from engine_service.core.outcome import Finish, FinishReason, Refusal, RefusalCode
from service_runtime.wire import Malformed
from tokenwire.engine.v1 import engine_pb2

# Past this many samples with unread news, commands wait until the client has read some.
MAX_UNREAD_OUTPUTS = 8192
# And past this many log probabilities of prompts, which are not bounded for each request by itself.
MAX_UNREAD_PROMPT_LOGPROBS = 4_000_000
# Keeps a merged message well below the transport's limit.
MAX_TOKENS_PER_MESSAGE = 262_144
_TOKENS_PER_LOGPROB = 4  # about as many bytes
_LAST_WORDS_SECONDS = 0.5
_SESSION_ENDED = Refusal(RefusalCode.CANCELLED, "the session ended")
_CANCELLED = Refusal(RefusalCode.CANCELLED, "cancelled by the client")

Context = grpc.aio.ServicerContext[engine_pb2.SessionRequest, engine_pb2.SessionResponse]


class _News(Protocol):
    """Something with news for a handle."""

    @property
    def seed(self) -> int: ...

    @property
    def index(self) -> int: ...

    @property
    def unread_prompt_logprobs(self) -> int: ...

    def take(self) -> Unread: ...


class _Refused:
    """A request that was refused at the door."""

    seed = 0
    index = 0
    unread_prompt_logprobs = 0

    def __init__(self, prompt_tokens: int, refusal: Refusal) -> None:
        self._finish = Finish(FinishReason.ERROR, prompt_tokens, 0, 0, error=refusal)

    def take(self) -> Unread:
        return Unread([], self._finish)


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
        self._num_untold: dict[int, int] = {}  # handle -> samples whose finish has not been sent
        self._unread: dict[_News, int] = {}  # -> handle
        self._unread_prompts: dict[_News, int] = {}  # -> log probabilities; they are there at the first news
        self._num_unread_prompt = 0
        self._has_news = asyncio.Event()
        self._must_say_draining = False
        self._load = LoadNews(handle, self._has_news.set)
        self._adapters = AdapterFeed(handle, self._has_news.set)
        self._tells_load = False
        self._heartbeat = HeartbeatWatch(None)
        self._has_room = asyncio.Event()
        self._all_written = asyncio.Event()
        self._has_room.set()
        self._all_written.set()

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
        all_written = asyncio.create_task(self._all_written.wait())
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
                await self._has_room.wait()
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
        if handle in self._num_untold:
            return Refusal(RefusalCode.INVALID, f"handle {handle} is in use", "submit.handle")
        admitted = self._door.admit(
            message.request,
            call_timeout_s=self._context.time_remaining(),
            wake=partial(self._add_news, handle),
        )
        if isinstance(admitted, Refusal):
            self._num_untold[handle] = 1
            self._add_news(handle, _Refused(len(message.request.prompt_token_ids), admitted))
        else:
            self._num_untold[handle] = len(admitted.samples)
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

    def _add_news(self, handle: int, news: _News) -> None:
        self._unread[news] = handle
        self._has_news.set()
        self._all_written.clear()
        count = news.unread_prompt_logprobs
        if count and news not in self._unread_prompts:
            self._unread_prompts[news] = count
            self._num_unread_prompt += count
        if self._is_full():
            self._has_room.clear()

    def _is_full(self) -> bool:
        return len(self._unread) > MAX_UNREAD_OUTPUTS or self._num_unread_prompt > MAX_UNREAD_PROMPT_LOGPROBS

    async def _write_outputs(self) -> None:
        while True:
            await self._has_news.wait()
            if self._must_say_draining:
                self._must_say_draining = False
                await self._context.write(engine_pb2.SessionResponse(draining=engine_pb2.EngineDraining()))
            response = engine_pb2.SessionResponse()
            await self._add_outputs(response.step)
            if response.step.outputs:
                await self._context.write(response)
            # After the outputs, which end the news: what becomes due from here on begins another round.
            load = self._load.take()
            if load is not None:
                await self._context.write(engine_pb2.SessionResponse(load=load_news_message(load)))
            adapters = self._adapters.take()
            if adapters is not None:
                await self._context.write(engine_pb2.SessionResponse(adapters=adapters))
            if not self._unread:
                self._all_written.set()

    async def _add_outputs(self, step: engine_pb2.StepOutputs) -> None:
        """The news of all handles; the rest stays for the next message when there is very much of it."""
        outputs = step.outputs
        num_tokens = 0
        while self._unread and num_tokens < MAX_TOKENS_PER_MESSAGE:
            news = next(iter(self._unread))
            handle = self._unread.pop(news)
            self._num_unread_prompt -= self._unread_prompts.pop(news, 0)
            unread = news.take()
            num_tokens += len(unread.token_ids)
            if unread.logprobs or unread.prompt_logprobs:
                num_tokens += _TOKENS_PER_LOGPROB * unread.num_logprobs
            if unread.token_ids or unread.finish is not None:
                outputs.append(request_output(handle, unread, news.seed, news.index))
                if unread.prompt_logprobs:
                    await add_prompt_logprobs(outputs[-1], unread.prompt_logprobs)
            if unread.finish is not None:
                self._forget_sample(handle)
        if not self._unread and not self._must_say_draining:
            self._has_news.clear()
        if not self._is_full():
            self._has_room.set()

    def _forget_sample(self, handle: int) -> None:
        """One more finish of this handle has been sent; after the last one it may be used again."""
        self._num_untold[handle] -= 1
        if self._num_untold[handle] == 0:
            del self._num_untold[handle]
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
