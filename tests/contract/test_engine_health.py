"""Health of the engine service in its levels: the process, readiness, the loop, the model."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_service.api.grpc_service import SERVICE_NAME
from engine_service.api.vitals import VitalLimits
from tests.fixtures.scripted_engine import ScriptedService, continuation, scripted_service
from tokenwire.common.v1 import sampling_pb2
from tokenwire.engine.v1 import engine_pb2

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
AT_ONCE = VitalLimits(stall_s=0.0, silence_s=0.0, patience_s=0.2, probe_s=0.2)
SICK = 66


async def health(service: ScriptedService, name: str) -> Any:
    stub = health_pb2_grpc.HealthStub(service.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)).status


def generate(service: ScriptedService, prompt: list[int], max_tokens: int) -> Any:
    sampling = sampling_pb2.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    request = engine_pb2.TokenRequest(prompt_token_ids=prompt, sampling=sampling)
    return service.stub.Generate(engine_pb2.GenerateRequest(request=request))


async def until_stepping(service: ScriptedService) -> None:
    async with asyncio.timeout(5):
        while not service.worker.plans:  # noqa: ASYNC110 (the engine's thread has no event for us)
            await asyncio.sleep(0.001)


async def test_an_idle_engine_is_well_on_all_levels_without_a_step() -> None:
    async with scripted_service() as service:
        for name in ("", "live", SERVICE_NAME, "loop", "model"):
            assert await health(service, name) == SERVING
        assert service.worker.plans == []


async def test_the_loop_is_well_while_steps_come_and_not_when_one_is_late() -> None:
    async with scripted_service(gated=True, vital_limits=VitalLimits(stall_s=0.0, patience_s=0.2)) as service:
        call = generate(service, [5], 2)
        await until_stepping(service)
        assert await health(service, "loop") == NOT_SERVING
        assert await health(service, "live") == SERVING
        service.worker.open_gate()
        assert [token async for message in call for token in message.token_ids] == continuation([5], 2)
        assert await health(service, "loop") == SERVING


async def test_a_late_step_that_ends_while_the_loop_is_asked_is_good_enough() -> None:
    async with scripted_service(gated=True, vital_limits=VitalLimits(stall_s=0.0, patience_s=10.0)) as service:
        call = generate(service, [5], 1)
        await until_stepping(service)
        asked = asyncio.create_task(health(service, "loop"))
        service.worker.open_gate()
        assert await asked == SERVING
        call.cancel()


async def test_after_a_silence_the_model_is_asked_for_one_token() -> None:
    async with scripted_service(vital_limits=AT_ONCE) as service:
        answers = await asyncio.gather(*(health(service, "model") for _ in range(3)))
        assert answers == [SERVING] * 3
        assert len(service.worker.plans) >= 3
        assert service.handle.num_live == 0


async def test_a_model_that_does_not_answer_in_time_is_not_well_and_the_probe_is_ended() -> None:
    async with scripted_service(gated=True, vital_limits=AT_ONCE) as service:
        assert await health(service, "model") == NOT_SERVING
        service.worker.open_gate()
        await asyncio.wait_for(service.handle.wait_idle(), 5)
        assert await health(service, "model") == SERVING


async def test_a_request_that_failed_by_itself_makes_the_next_check_a_probe() -> None:
    async with scripted_service(sickness=SICK) as service:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await generate(service, [SICK, 1], 3).read()
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        before = len(service.worker.plans)
        assert await health(service, "model") == SERVING
        after = len(service.worker.plans)
        assert after > before
        assert await health(service, "model") == SERVING
        assert len(service.worker.plans) <= after + 1  # the engine may still forget the probe


async def test_probes_are_the_first_in_line() -> None:
    """A full house does not make the model look dead."""
    async with scripted_service(gated=True, vital_limits=VitalLimits(10.0, 0.0), max_num_requests=1) as service:
        calls = [generate(service, [5 + place], 400) for place in range(5)]
        await until_stepping(service)
        asked = asyncio.create_task(health(service, "model"))
        async with asyncio.timeout(5):
            while service.handle.num_live < 6:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        while not asked.done():  # a few steps at a time, so that the others cannot all end before the answer is seen
            service.worker.allow(50)
            await asyncio.wait({asked}, timeout=0.01)
        assert await asked == SERVING
        assert service.handle.num_live >= 3, "the probe has waited for those that came before it"
        for call in calls:
            call.cancel()
