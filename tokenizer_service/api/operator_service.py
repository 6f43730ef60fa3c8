"""OperatorService over gRPC: engine replicas and their adapters, the status, the service's end.

Must not know: requests of clients, how replicas are chosen.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from service_runtime.drain import read_grace
from service_runtime.wire import Malformed, request_parser
from tokenizer_service.api.adapter_operator import AdapterOperator
from tokenizer_service.api.engine_messages import engine_message
from tokenizer_service.api.errors import abort
from tokenizer_service.api.status import StatusReader
from tokenizer_service.engines.refusal import Refusal, RefusalCode, Violation, invalid
from tokenizer_service.routing.replicas import Replicas
from tokenizer_service.sessions.admission import Admission
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

OPERATOR_SERVICE_NAME = "tokenwire.tokenizer.v1.OperatorService"

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class OperatorServicer:
    """`ask_to_drain` starts a drain with a grace in seconds (None: the usual one)."""

    replicas: Replicas
    admission: Admission
    ask_to_drain: Callable[[float | None], None]
    status: StatusReader
    adapters: AdapterOperator

    def list_engines(self, _request: pb.ListEnginesRequest) -> pb.ListEnginesResponse:
        return pb.ListEnginesResponse(engines=[engine_message(replica) for replica in self.replicas.all()])

    def add_engine(self, request: pb.AddEngineRequest) -> pb.AddEngineResponse | Refusal:
        return self.replicas.add_by_operator(request.address) or pb.AddEngineResponse()

    def remove_engine(self, request: pb.RemoveEngineRequest) -> pb.RemoveEngineResponse | Refusal:
        return self.replicas.remove_by_operator(request.address) or pb.RemoveEngineResponse()

    async def get_status(
        self, request: pb.GetStatusRequest | Malformed, _context: Context
    ) -> pb.GetStatusResponse | Refusal:
        return _malformed(request) if isinstance(request, Malformed) else await self.status.read(request)

    async def drain(self, request: pb.DrainRequest | Malformed, context: Context) -> pb.DrainResponse:
        if isinstance(request, Malformed):
            await abort(context, _malformed(request))
        self.ask_to_drain(await read_grace(context, request.grace, request.HasField("grace")))
        await self.admission.draining.wait()
        return pb.DrainResponse(live_requests=self.admission.num_active)

    async def load_adapter(
        self, request: pb.LoadAdapterRequest | Malformed, context: Context
    ) -> pb.LoadAdapterResponse | Refusal:
        if isinstance(request, Malformed):
            return _malformed(request)
        return await self.adapters.load(request.name, context.time_remaining())

    async def unload_adapter(
        self, request: pb.UnloadAdapterRequest | Malformed, context: Context
    ) -> pb.UnloadAdapterResponse | Refusal:
        if isinstance(request, Malformed):
            return _malformed(request)
        return await self.adapters.unload(request.name, context.time_remaining())

    async def list_adapters(
        self, request: pb.ListAdaptersRequest | Malformed, context: Context
    ) -> AsyncIterator[pb.ListAdaptersResponse]:
        if isinstance(request, Malformed):
            await abort(context, _malformed(request))
        for engine in self.adapters.all():
            yield engine


def add_to_server(servicer: OperatorServicer, server: grpc.aio.Server) -> None:
    """Registers the methods with our own reading of requests (see service_runtime.wire)."""
    unary = grpc.unary_unary_rpc_method_handler
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "ListEngines": unary(
            _answered(servicer.list_engines),
            request_parser(pb.ListEnginesRequest),
            pb.ListEnginesResponse.SerializeToString,
        ),
        "AddEngine": unary(
            _answered(servicer.add_engine), request_parser(pb.AddEngineRequest), pb.AddEngineResponse.SerializeToString
        ),
        "RemoveEngine": unary(
            _answered(servicer.remove_engine),
            request_parser(pb.RemoveEngineRequest),
            pb.RemoveEngineResponse.SerializeToString,
        ),
        "GetStatus": unary(
            _or_aborted(servicer.get_status),
            request_parser(pb.GetStatusRequest),
            pb.GetStatusResponse.SerializeToString,
        ),
        "Drain": unary(servicer.drain, request_parser(pb.DrainRequest), pb.DrainResponse.SerializeToString),
        "LoadAdapter": unary(
            _or_aborted(servicer.load_adapter),
            request_parser(pb.LoadAdapterRequest),
            pb.LoadAdapterResponse.SerializeToString,
        ),
        "UnloadAdapter": unary(
            _or_aborted(servicer.unload_adapter),
            request_parser(pb.UnloadAdapterRequest),
            pb.UnloadAdapterResponse.SerializeToString,
        ),
        "ListAdapters": grpc.unary_stream_rpc_method_handler(
            servicer.list_adapters,
            request_parser(pb.ListAdaptersRequest),
            pb.ListAdaptersResponse.SerializeToString,
        ),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(OPERATOR_SERVICE_NAME, handlers),))


def _answered(
    method: Callable[[RequestT], ResponseT | Refusal],
) -> Callable[[RequestT | Malformed, Context], Awaitable[ResponseT]]:
    """Of a method that needs neither time nor the call's context."""

    async def serve(request: RequestT | Malformed, _context: Context) -> ResponseT | Refusal:
        return _malformed(request) if isinstance(request, Malformed) else method(request)

    return _or_aborted(serve)


def _or_aborted(
    method: Callable[[RequestT, Context], Awaitable[ResponseT | Refusal]],
) -> Callable[[RequestT, Context], Awaitable[ResponseT]]:
    """Ends the call with the status of a refusal."""

    async def serve(request: RequestT, context: Context) -> ResponseT:
        answer = await method(request, context)
        if isinstance(answer, Refusal):
            await abort(context, answer)
        return answer

    return serve


def _malformed(request: Malformed) -> Refusal:
    if not request.field:
        return Refusal(RefusalCode.INVALID_ARGUMENT, request.description)
    return invalid((Violation(request.field, request.description),))
