"""`vllm.grpc.engine.VllmEngine` over the same door and handle as our own API, for gateways that speak it.

A facade: it translates, and decides nothing. Must not know: torch, how the engine runs, how requests are validated.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import grpc
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb2
from smg_grpc_proto.generated import common_pb2

from engine_service.api import errors
from engine_service.api.door import Door
from engine_service.api.engine_handle import STARTING, Connection, EngineHandle
from engine_service.api.live_request import LiveRequest
from engine_service.api.vllm_compat.generation import Context, Generation
from engine_service.api.vllm_compat.info import LoadReporter, model_info, server_info
from engine_service.api.vllm_compat.kv_batches import BatchWriter, has_gap
from engine_service.api.vllm_compat.model_cache import ModelCache
from engine_service.api.vllm_compat.model_files import BundleTooLarge
from engine_service.api.vllm_compat.request import token_request, with_gateway_fields
from engine_service.api.vllm_compat.stop_watch import StopWatch
from engine_service.api.vllm_compat.subscriptions import MAX_SUBSCRIPTIONS, Subscriptions
from engine_service.core.outcome import Refusal, RefusalCode
from service_runtime import statuses
from service_runtime.trace_context import context_of_headers
from service_runtime.wire import Malformed, request_parser

SERVICE_NAME = "vllm.grpc.engine.VllmEngine"
_CHUNK_BYTES = 64 * 1024


class VllmEngineService:
    """The methods of VllmEngine that this engine has; the others answer UNIMPLEMENTED. `clock` is in seconds."""

    def __init__(
        self,
        *,
        door: Door,
        handle: EngineHandle,
        model_name: str,
        engine_version: str,
        clock: Callable[[], float],
    ) -> None:
        self._door = door
        self._handle = handle
        self._model_name = model_name
        self._clock = clock
        self._started = clock()
        self._loads = LoadReporter(engine_version, clock)
        self._files = ModelCache()
        self._subscriptions = Subscriptions(handle.kv_feed)

    async def health_check(
        self, _request: vllm_pb2.HealthCheckRequest, context: Context
    ) -> vllm_pb2.HealthCheckResponse:
        """OK only while requests are taken: a gateway registers whoever answers OK, whatever the message says."""
        connection = self._handle.connection()
        if isinstance(connection, Refusal):
            await errors.abort(context, connection)
        return vllm_pb2.HealthCheckResponse(healthy=True, message="serving")

    async def get_model_info(
        self, _request: vllm_pb2.GetModelInfoRequest, context: Context
    ) -> vllm_pb2.GetModelInfoResponse:
        info = (await self._running_engine(context)).info
        return model_info(info, await self._files.facts(info), self._model_name)

    async def get_server_info(
        self, _request: vllm_pb2.GetServerInfoRequest, context: Context
    ) -> vllm_pb2.GetServerInfoResponse:
        connection = await self._running_engine(context)
        return server_info(connection.info, self._handle.num_live, self._clock() - self._started)

    async def get_loads(self, request: vllm_pb2.GetLoadsRequest, context: Context) -> vllm_pb2.GetLoadsResponse:
        connection = await self._running_engine(context)
        rank = request.dp_rank if request.HasField("dp_rank") else None
        return self._loads.report(connection.stats, connection.info, rank)

    async def generate(self, request: vllm_pb2.GenerateRequest, context: Context) -> None:
        translated = token_request(request)
        if isinstance(translated, Refusal):
            await errors.abort(context, translated)
        new_watch = await self._stop_watches(request.sampling_params)
        woken: asyncio.Queue[LiveRequest] = asyncio.Queue()
        submission = self._door.admit(
            translated,
            call_timeout_s=context.time_remaining(),
            wake=woken.put_nowait,
            trace_of_call=context_of_headers(context.invocation_metadata() or ()),
        )
        if isinstance(submission, Refusal):
            await errors.abort(context, with_gateway_fields(submission))
        await Generation(request, submission, woken, self._handle, context, new_watch).run()

    async def abort(self, request: vllm_pb2.AbortRequest, _context: Context) -> vllm_pb2.AbortResponse:
        """Unknown and finished ids are fine: gateways send them."""
        await self._handle.abort(request.request_ids)
        return vllm_pb2.AbortResponse()

    async def get_tokenizer(self, _request: common_pb2.GetTokenizerRequest, context: Context) -> None:
        """The tokenizer's files as a ZIP, in parts; the last part has the digest of the whole."""
        info = (await self._running_engine(context)).info
        try:
            bundle = await self._files.bundle(info)
        except BundleTooLarge as error:
            await errors.abort(context, Refusal(RefusalCode.TOO_LARGE, str(error)))
        if bundle is None:
            await statuses.abort(context, grpc.StatusCode.NOT_FOUND, "the model has no tokenizer files")
        for start in range(0, len(bundle.data), _CHUNK_BYTES):
            end = start + _CHUNK_BYTES
            sha256 = bundle.sha256 if end >= len(bundle.data) else ""
            await context.write(common_pb2.GetTokenizerChunk(data=bundle.data[start:end], sha256=sha256))

    async def subscribe_kv_events(self, request: common_pb2.SubscribeKvEventsRequest, context: Context) -> None:
        """Begins with what is cached now. Nothing is kept for replay: a stream cannot be taken up again."""
        if request.start_sequence_number:
            message = f"batches after {request.start_sequence_number:,} are not kept: subscribe from 0"
            await statuses.abort(context, grpc.StatusCode.OUT_OF_RANGE, message)
        connection = await self._running_engine(context)
        if self._subscriptions.is_full:
            message = f"{MAX_SUBSCRIPTIONS} streams of KV events are open, the most there may be"
            await statuses.abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, message)
        # An idle stream without headers looks like a dead engine.
        await context.send_initial_metadata(())
        with self._subscriptions.subscribed(connection) as subscription:
            writer = BatchWriter(time.time)
            while events := await subscription.take():
                if has_gap(events):
                    await statuses.abort(context, grpc.StatusCode.DATA_LOSS, "events were lost: subscribe from 0")
                for batch in writer.batches(events):
                    await context.write(batch)
        await errors.abort(context, connection.reason)

    async def _running_engine(self, context: Context) -> Connection:
        connection = self._handle.current
        if connection is None:
            await errors.abort(context, STARTING)
        return connection

    async def _stop_watches(self, sampling: vllm_pb2.SamplingParams) -> Callable[[], StopWatch | None]:
        """Makes one watch for each sample; none without stop strings, or without a tokenizer to find them with."""
        connection = self._handle.current
        tokenizer = None if connection is None or not sampling.stop else await self._files.tokenizer(connection.info)
        if tokenizer is None:
            return _no_watch
        return partial(StopWatch, tokenizer, tuple(sampling.stop), sampling.min_tokens)


def add_to_server(service: VllmEngineService, server: grpc.aio.Server) -> None:
    """Registers the methods with our own reading of requests (see service_runtime.wire)."""
    handlers = {
        "HealthCheck": _unary(service.health_check, vllm_pb2.HealthCheckRequest),
        "GetModelInfo": _unary(service.get_model_info, vllm_pb2.GetModelInfoRequest),
        "GetServerInfo": _unary(service.get_server_info, vllm_pb2.GetServerInfoRequest),
        "GetLoads": _unary(service.get_loads, vllm_pb2.GetLoadsRequest),
        "Abort": _unary(service.abort, vllm_pb2.AbortRequest),
        "Generate": _stream(service.generate, vllm_pb2.GenerateRequest),
        "SubscribeKvEvents": _stream(service.subscribe_kv_events, common_pb2.SubscribeKvEventsRequest),
        "GetTokenizer": _stream(service.get_tokenizer, common_pb2.GetTokenizerRequest),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))


def _no_watch() -> None:
    return None


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _unary(method: Callable[[Any, Context], Awaitable[Any]], kind: Any) -> "grpc.RpcMethodHandler[Any, Any]":
    return grpc.unary_unary_rpc_method_handler(_well_formed(method), request_parser(kind), _serialize)


def _stream(method: Callable[[Any, Context], Awaitable[Any]], kind: Any) -> "grpc.RpcMethodHandler[Any, Any]":
    return grpc.unary_stream_rpc_method_handler(_well_formed(method), request_parser(kind), _serialize)


def _well_formed(method: Callable[[Any, Context], Awaitable[Any]]) -> Callable[[Any, Context], Awaitable[Any]]:
    """`method` for requests that could be read; INVALID_ARGUMENT for the others."""

    async def serve(request: Any, context: Context) -> Any:
        if isinstance(request, Malformed):
            await errors.abort(context, errors.malformed(request))
        return await method(request, context)

    return serve
