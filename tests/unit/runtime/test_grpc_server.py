"""Server options, health, binding and statuses with details, over a real socket."""

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from service_runtime import statuses
from service_runtime.grpc_server import PortInUse, ServiceHealth, bind, server_options

NAME = "tokenwire.engine.v1.EngineService"


@pytest.fixture
async def served() -> AsyncIterator[tuple[int, ServiceHealth]]:
    server = grpc.aio.server(options=server_options(1 << 20))
    health = ServiceHealth([NAME])
    await health.add_to(server)
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    yield port, health
    await server.stop(None)


async def test_health_per_service_follows_what_is_said(served: tuple[int, ServiceHealth]) -> None:
    port, health = served
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for said, expected in ((None, 2), (True, 1), (False, 2)):
            if said is not None:
                await health.set_serving(said)
            for name in ("", NAME):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                assert answer.status == expected
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert unknown.value.code() == grpc.StatusCode.NOT_FOUND


async def test_reflection_lists_the_services(served: tuple[int, ServiceHealth]) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served[0]}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        async for answer in stub.ServerReflectionInfo(iter([request])):
            names = {service.name for service in answer.list_services_response.service}
            assert {NAME, "grpc.health.v1.Health"} <= names
            break


async def test_a_burst_of_calls_is_answered_and_not_cancelled(served: tuple[int, ServiceHealth]) -> None:
    """B118: the library ends calls beyond 1,000 to 3,000 that wait as CANCELLED; whom to refuse is ours to say."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served[0]}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        answers = await asyncio.gather(*(stub.Check(request) for _ in range(4_000)), return_exceptions=True)
    assert [answer for answer in answers if isinstance(answer, BaseException)] == []


async def test_a_port_in_use_is_an_error_not_shared(served: tuple[int, ServiceHealth]) -> None:
    second = grpc.aio.server(options=server_options(1 << 20))
    with pytest.raises(PortInUse, match=str(served[0])):
        bind(second, "127.0.0.1", served[0])


async def test_a_message_over_the_limit_is_resource_exhausted(served: tuple[int, ServiceHealth]) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{served[0]}") as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="x" * (2 << 20)))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_abort_carries_field_violations_and_retry_delay() -> None:
    async def handler(_request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        await statuses.abort(
            context,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "queue full: 2 of 2",
            field_violations=[("prompt", "too long")],
            retry_after_s=1.5,
        )

    server = grpc.aio.server()
    method = grpc.unary_unary_rpc_method_handler(handler)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", {"Go": method}),))
    port = bind(server, "127.0.0.1", 0)
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/t.T/Go")(b"")
    await server.stop(None)
    status = rpc_status.from_call(refused.value)
    assert status is not None
    assert status.message == "queue full: 2 of 2"
    bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(bad)
    assert status.details[1].Unpack(retry)
    assert [(v.field, v.description) for v in bad.field_violations] == [("prompt", "too long")]
    assert retry.retry_delay.ToTimedelta().total_seconds() == 1.5
