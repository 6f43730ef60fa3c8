"""What all generating endpoints do with a request once its fields are read: serve it, stream or answer, or refuse.

The 200 of a stream is sent with its first event: a refusal before it is an HTTP status. A failure after it is an
error event, and the stream then ends without what marks a good end.
Must not know: the fields or the shape of any one API.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from tokenizer_service.api.calls import ClientGone
from tokenizer_service.engines.messages import Usage
from tokenizer_service.engines.refusal import Refusal, invalid_field
from tokenizer_service.http.errors import FieldNames, HttpError, http_error
from tokenizer_service.http.exchange import Exchange, Receive, Scope, Send
from tokenizer_service.http.fields import FieldsT
from tokenizer_service.http.generations import Generations, Job, PlacedRefusal
from tokenizer_service.http.json_body import ClientLeft
from tokenizer_service.sessions.events import Completed, TextDelta
from tokenizer_service.sessions.request import RequestDraft

# An answer with the log probabilities of more tokens than these is written in a thread: it takes long.
_FEW_POSITIONS = 64
# What an answer that is not streamed may have to hold: about 50 MB of JSON.
MAX_ANSWER_LOGPROBS = 512 * 1024
_STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    # Reverse proxies would keep events back to send them together.
    "x-accel-buffering": "no",
}


class StreamShape(Protocol):
    """Makes the server-sent events of one API."""

    def frames(self, place: int, event: TextDelta | Completed) -> Iterable[bytes]:
        """Those that an event of the prompt at `place` causes."""

    def closing(self) -> Iterable[bytes]:
        """Those of a good end."""

    def failure(self, error: HttpError, delivered: Usage | None) -> Iterable[bytes]:
        """Those of a bad one, after so much (None: nothing)."""


class AnswerShape(Protocol):
    """Collects events into the one answer of an API."""

    def add(self, place: int, event: TextDelta | Completed) -> None: ...

    def body(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Generation:
    """A request as an API understood it: what to generate, how its client calls the fields (of the prompt at a place).

    One of `stream` and `answer` is set.
    """

    drafts: Sequence[RequestDraft]
    names: Callable[[int], FieldNames]
    stream: StreamShape | None = None
    answer: AnswerShape | None = None


@dataclass(frozen=True, slots=True)
class GenerationEndpoint(Generic[FieldsT]):
    """An ASGI application for one route. `read` turns the fields into a Generation, or says what is wrong."""

    method: str
    generations: Generations
    kind: type[FieldsT]
    read: Callable[[FieldsT, str], Awaitable[Generation | HttpError]]
    open_exchange: Callable[[Scope, Receive, Send], Exchange]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = self.open_exchange(scope, receive, send)
        try:
            fields = await exchange.read(self.kind)
            if isinstance(fields, HttpError):
                await exchange.fail(fields)
                return
            await exchange.while_listening(self._serve(exchange, fields))
        except ClientLeft:
            return

    async def _serve(self, exchange: Exchange, fields: FieldsT) -> None:
        deadline = exchange.deadline(asyncio.get_running_loop().time())
        if isinstance(deadline, HttpError):
            await exchange.fail(deadline)
            return
        generation = await self._read(fields, exchange)
        if isinstance(generation, HttpError):
            await exchange.fail(generation)
            return
        job = Job(self.method, generation.drafts, deadline, exchange.tenant, exchange.trace)
        if generation.stream is not None:
            await self._stream(exchange, job, generation.stream, generation.names)
        elif generation.answer is not None:
            await self._answer(exchange, job, generation.answer, generation.names)

    async def _read(self, fields: FieldsT, exchange: Exchange) -> Generation | HttpError:
        with self.generations.place_to_read(self.method, exchange.tenant, exchange.trace) as refusal:
            if refusal is not None:
                return http_error(refusal, FieldNames())
            return await self.read(fields, exchange.request_id)

    async def _stream(
        self, exchange: Exchange, job: Job, shape: StreamShape, names: Callable[[int], FieldNames]
    ) -> None:
        async def consume(place: int, event: TextDelta | Completed) -> None:
            data = b"".join(shape.frames(place, event))
            if data:
                await _write_event(exchange, data)

        failed = await self.generations.run(job, consume)
        if failed is None:
            await exchange.write(b"".join(shape.closing()), more=False)
            return
        error = _error(failed, names)
        if exchange.is_started:
            await exchange.write(b"".join(shape.failure(error, failed.delivered)), more=False)
        else:
            await exchange.fail(error)

    async def _answer(
        self, exchange: Exchange, job: Job, shape: AnswerShape, names: Callable[[int], FieldNames]
    ) -> None:
        positions, logprobs = 0, 0

        async def consume(place: int, event: TextDelta | Completed) -> Refusal | None:
            nonlocal positions, logprobs
            if isinstance(event, TextDelta):
                positions += len(event.logprobs) + len(event.prompt_logprobs)
                logprobs += sum(1 + len(position.top) for position in (*event.logprobs, *event.prompt_logprobs))
            if logprobs > MAX_ANSWER_LOGPROBS:
                return too_many_logprobs(logprobs)
            shape.add(place, event)
            return None

        failed = await self.generations.run(job, consume)
        if failed is not None:
            await exchange.fail(_error(failed, names))
            return
        body = shape.body() if positions <= _FEW_POSITIONS else await exchange.in_thread(shape.body)
        if isinstance(body, HttpError):
            await exchange.fail(body)
        else:
            await exchange.answer(body)


def too_many_logprobs(count: int) -> Refusal:
    text = f"{count:,} log probabilities exceed the {MAX_ANSWER_LOGPROBS:,} of an answer that is not streamed"
    return invalid_field("logprobs", text)


async def _write_event(exchange: Exchange, data: bytes) -> None:
    """Raises ClientGone, which counts the request as cancelled, when the client does not read for too long."""
    try:
        if not exchange.is_started:
            await exchange.start(200, _STREAM_HEADERS)
        await exchange.write(data, more=True)
    except ClientLeft:
        raise ClientGone from None


def _error(failed: PlacedRefusal, names: Callable[[int], FieldNames]) -> HttpError:
    return http_error(failed.refusal, names(failed.place))


def data_frame(payload: bytes) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + payload + b"\n\n"


def error_frame(error: HttpError) -> bytes:
    return data_frame(error.body())
