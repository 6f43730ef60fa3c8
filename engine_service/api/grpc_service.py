"""EngineService over gRPC: a thin layer over the door, the handle and the sessions.

Must not know: torch, how the engine runs, how requests are validated.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from engine_service.api import errors
from engine_service.api.adapter_loader import AdapterLoader, checked_loader
from engine_service.api.convert import (
    adapter_message,
    add_prompt_logprobs,
    generate_response,
    load_message,
    model_info_message,
)
from engine_service.api.door import Door
from engine_service.api.engine_handle import STARTING, Connection, EngineHandle
from engine_service.api.kv_changes import change_messages
from engine_service.api.kv_mirror import MAX_WATCHERS, KvWatchers
from engine_service.api.live_request import LiveRequest, Submission
from engine_service.api.session import Session
from engine_service.api.step_dump_call import check_dump_allowed, recorded_parts
from engine_service.core.outcome import Refusal, RefusalCode
from service_runtime.drain import check_allowed, read_grace
from service_runtime.trace_context import context_of_headers
from service_runtime.wire import Malformed, request_parser
from tokenwire.engine.v1 import engine_pb2

SERVICE_NAME = "tokenwire.engine.v1.EngineService"
# A peer that calls Session and then says nothing does not keep the stream.
SESSION_OPEN_TIMEOUT_SECONDS = 10.0
# Changes gather that long between two messages: the watchers cost the engine's front next to nothing.
_KV_PAUSE_SECONDS = 0.02
_CLIENT_LEFT = Refusal(RefusalCode.CANCELLED, "the client left")

GenerateContext = grpc.aio.ServicerContext[engine_pb2.GenerateRequest, engine_pb2.GenerateResponse]


class EngineService:
    """The methods of EngineService. Errors are statuses: see `api/errors.py`. `clock` is the handle's, in seconds.

    `ask_to_drain` starts a drain with a grace in seconds (None: the usual one); without it calls may not.
    """

    def __init__(
        self,
        *,
        door: Door,
        handle: EngineHandle,
        model_name: str,
        engine_version: str,
        clock: Callable[[], float],
        session_open_timeout_s: float = SESSION_OPEN_TIMEOUT_SECONDS,
        ask_to_drain: Callable[[float | None], None] | None = None,
        allow_step_dumps: bool = False,
        loader: AdapterLoader | None = None,
    ) -> None:
        self._door = door
        self._handle = handle
        self._model_name = model_name
        self._engine_version = engine_version
        self._clock = clock
        self._session_open_timeout_s = session_open_timeout_s
        self._watchers = KvWatchers(handle.kv_feed)
        self._ask_to_drain = ask_to_drain
        self.num_sessions = 0
        self._allow_step_dumps = allow_step_dumps
        self._loader = loader

    async def session(
        self,
        _requests: AsyncIterator[engine_pb2.SessionRequest | Malformed],
        context: grpc.aio.ServicerContext[engine_pb2.SessionRequest, engine_pb2.SessionResponse],
    ) -> None:
        self.num_sessions += 1
        try:
            await Session(context, self._door, self._handle, self._opened, self._session_open_timeout_s).run()
        finally:
            self.num_sessions -= 1

    async def generate(self, request: engine_pb2.GenerateRequest, context: GenerateContext) -> None:
        # Samples that had nothing unread before their news: an entry, or two when it was cut, for each.
        woken: asyncio.Queue[LiveRequest] = asyncio.Queue()
        submission = self._door.admit(
            request.request,
            call_timeout_s=context.time_remaining(),
            wake=woken.put_nowait,
            trace_of_call=context_of_headers(context.invocation_metadata() or ()),
        )
        if isinstance(submission, Refusal):
            await errors.abort(context, submission)
        try:
            await self._stream(submission, woken, context)
        finally:
            # Also when the task is cancelled because the client left: the end of the call ends the request.
            self._handle.cancel(submission.samples, _CLIENT_LEFT)

    async def _stream(
        self, submission: Submission, woken: "asyncio.Queue[LiveRequest]", context: GenerateContext
    ) -> None:
        """Until all samples have ended; then the first error, if there was one, is the status of the call."""
        error: Refusal | None = None
        num_open = len(submission.samples)
        while num_open:
            live = await woken.get()
            unread = live.take()
            finish = unread.finish
            # A refusal before the first token is a status alone.
            is_refusal = finish is not None and finish.error is not None and finish.completion_tokens == 0
            if (unread.token_ids or finish is not None) and not is_refusal:
                message = generate_response(unread, live.seed, live.index)
                await add_prompt_logprobs(message, unread.prompt_logprobs)
                await context.write(message)
            if finish is not None:
                num_open -= 1
                error = error or finish.error
        if error is not None:
            await errors.abort(context, error)

    async def abort(
        self, request: engine_pb2.AbortRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> engine_pb2.AbortResponse:
        await self._handle.abort(request.request_ids)
        return engine_pb2.AbortResponse()

    async def get_model_info(
        self, request: engine_pb2.GetModelInfoRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> engine_pb2.GetModelInfoResponse:
        return self._model_info(await self._running_engine(context))

    async def get_load(
        self, request: engine_pb2.GetLoadRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> engine_pb2.GetLoadResponse:
        connection = await self._running_engine(context)
        last = connection.last_step
        age_s = None if last is None else self._clock() - last
        return load_message(connection.stats, connection.info.pid, age_s, connection.step_seconds)

    async def watch_kv_events(
        self,
        request: engine_pb2.WatchKvEventsRequest,
        context: grpc.aio.ServicerContext[engine_pb2.WatchKvEventsRequest, engine_pb2.WatchKvEventsResponse],
    ) -> None:
        connection = await self._running_engine(context)
        if self._watchers.is_full:
            message = f"{MAX_WATCHERS} streams of KV events are open, the most there may be"
            await errors.abort(context, Refusal(RefusalCode.QUEUE_FULL, message, retry_after_s=1.0))
        info = connection.info
        sequence_number = 0
        with self._watchers.watching(connection) as watcher:
            while (news := await watcher.take()) is not None:
                for changes in change_messages(news):
                    sequence_number += 1
                    await context.write(
                        engine_pb2.WatchKvEventsResponse(
                            engine_epoch=info.epoch,
                            sequence_number=sequence_number,
                            block_size=info.block_size,
                            changes=changes,
                        )
                    )
                await asyncio.sleep(_KV_PAUSE_SECONDS)
        await errors.abort(context, connection.reason)

    async def dump_steps(
        self,
        request: engine_pb2.DumpStepsRequest,
        context: grpc.aio.ServicerContext[engine_pb2.DumpStepsRequest, engine_pb2.DumpStepsResponse],
    ) -> None:
        await check_dump_allowed(context, self._allow_step_dumps)
        connection = await self._running_engine(context)
        parts = await recorded_parts(self._handle, connection, request, self._clock)
        if isinstance(parts, Refusal):
            await errors.abort(context, parts)
        # In a thread: of very many chunks each part takes some milliseconds.
        while (text := await asyncio.to_thread(next, parts, None)) is not None:
            await context.write(engine_pb2.DumpStepsResponse(data=text.encode()))

    async def load_adapter(
        self, request: engine_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> engine_pb2.LoadAdapterResponse:
        loader = await checked_loader(context, self._loader)
        loaded = await loader.load(await self._running_engine(context), request.name)
        if isinstance(loaded, Refusal):
            await errors.abort(context, loaded)
        return engine_pb2.LoadAdapterResponse(adapter=adapter_message(loaded))

    async def unload_adapter(
        self, request: engine_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> engine_pb2.UnloadAdapterResponse:
        loader = await checked_loader(context, self._loader)
        refusal = await loader.unload(await self._running_engine(context), request.name)
        if refusal is not None:
            await errors.abort(context, refusal)
        return engine_pb2.UnloadAdapterResponse()

    async def drain(
        self, request: engine_pb2.DrainRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> engine_pb2.DrainResponse:
        await check_allowed(context, self._ask_to_drain is not None)
        grace_s = await read_grace(context, request.grace, request.HasField("grace"))
        assert self._ask_to_drain is not None
        self._ask_to_drain(grace_s)
        await self._handle.draining.wait()
        return engine_pb2.DrainResponse(live_requests=self._handle.num_live)

    async def _running_engine(self, context: grpc.aio.ServicerContext[Any, Any]) -> Connection:
        connection = self._handle.current
        if connection is None:
            await errors.abort(context, STARTING)
        return connection

    def _model_info(self, connection: Connection) -> engine_pb2.GetModelInfoResponse:
        return model_info_message(connection.info, self._model_name, self._engine_version, connection.adapters)

    def _opened(self, connection: Connection) -> engine_pb2.SessionOpened:
        return engine_pb2.SessionOpened(
            model=self._model_info(connection), engine_epoch=connection.info.epoch, takes_heartbeats=True
        )


def add_to_server(service: EngineService, server: grpc.aio.Server) -> None:
    """Registers the methods with our own reading of requests (see service_runtime.wire)."""
    unary = grpc.unary_unary_rpc_method_handler
    pb = engine_pb2
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Session": grpc.stream_stream_rpc_method_handler(
            service.session, request_parser(pb.SessionRequest), pb.SessionResponse.SerializeToString
        ),
        "Generate": grpc.unary_stream_rpc_method_handler(
            _well_formed(service.generate),
            request_parser(pb.GenerateRequest),
            pb.GenerateResponse.SerializeToString,
        ),
        "Abort": unary(
            _well_formed(service.abort), request_parser(pb.AbortRequest), pb.AbortResponse.SerializeToString
        ),
        "GetModelInfo": unary(
            _well_formed(service.get_model_info),
            request_parser(pb.GetModelInfoRequest),
            pb.GetModelInfoResponse.SerializeToString,
        ),
        "GetLoad": unary(
            _well_formed(service.get_load), request_parser(pb.GetLoadRequest), pb.GetLoadResponse.SerializeToString
        ),
        "WatchKvEvents": grpc.unary_stream_rpc_method_handler(
            _well_formed(service.watch_kv_events),
            request_parser(pb.WatchKvEventsRequest),
            pb.WatchKvEventsResponse.SerializeToString,
        ),
        "DumpSteps": grpc.unary_stream_rpc_method_handler(
            _well_formed(service.dump_steps),
            request_parser(pb.DumpStepsRequest),
            pb.DumpStepsResponse.SerializeToString,
        ),
        "LoadAdapter": unary(
            _well_formed(service.load_adapter),
            request_parser(pb.LoadAdapterRequest),
            pb.LoadAdapterResponse.SerializeToString,
        ),
        "UnloadAdapter": unary(
            _well_formed(service.unload_adapter),
            request_parser(pb.UnloadAdapterRequest),
            pb.UnloadAdapterResponse.SerializeToString,
        ),
        "Drain": unary(
            _well_formed(service.drain), request_parser(pb.DrainRequest), pb.DrainResponse.SerializeToString
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


def _well_formed(method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """`method` for requests that could be read; INVALID_ARGUMENT for the others."""

    async def serve(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        if isinstance(request, Malformed):
            await errors.abort(context, errors.malformed(request))
        return await method(request, context)

    return serve
