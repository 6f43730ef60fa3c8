"""The engine's metrics: what they say of reports, and that they are idle again afterwards."""

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from engine_service.api.engine_gauges import MAX_TENANT_NAMES
from engine_service.api.engine_metrics import EngineMetrics
from engine_service.core.stats import EngineStats
from engine_service.loop.messages import EngineInfo, EngineReady, RequestTiming, StartTimes, StepReport, StepTiming

INFO = EngineInfo(0, "e", 512, 512, (0,), "", "Scripted", "float32", 4, 256, 16, kv_block_bytes=1024)
STATS = EngineStats(0, 0, 0, 256, 0, 0, 256, 0, 0, 0, 0, 0, 0, 0, {})


class World:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = EngineMetrics(self.registry, model_name="m", version="1")
        self.metrics.engine_started(EngineReady(INFO, STATS, StartTimes(2.0, 0.5)), 3.0)

    def get(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"tokenwire_engine_{name}", labels)

    def tenants(self, state: str) -> dict[str, float]:
        return {
            sample.labels["tenant"]: sample.value
            for family in self.registry.collect()
            if family.name == f"tokenwire_engine_tenant_{state}_requests"
            for sample in family.samples
        }


@pytest.mark.parametrize(
    ("tokens", "prefill", "kind"), [(3, 0, "decode"), (8, 8, "prefill"), (8, 5, "mixed"), (0, 0, "empty")]
)
def test_a_step_is_of_the_kind_of_what_it_computed(tokens: int, prefill: int, kind: str) -> None:
    world = World()
    step = StepTiming(0.25, tokens, prefill, 2)
    world.metrics.observe_report(StepReport((), STATS, (step,)))
    assert world.get("step_seconds_sum", kind=kind) == 0.25
    assert sum(world.get("step_seconds_count", kind=each) or 0 for each in ("decode", "prefill", "mixed", "empty")) == 1
    assert (world.get("step_tokens_sum"), world.get("step_requests_sum")) == (tokens, 2)


def test_stages_of_requests_that_did_not_come_to_a_token_are_no_prefills() -> None:
    world = World()
    timings = (RequestTiming(1, 1.0, 2.0, 4.0), RequestTiming(2, 1.0, 9.0, None), RequestTiming(3, 1.0, None, None))
    world.metrics.observe_report(StepReport((), STATS, (), timings))
    sums = {stage: world.get(f"{stage}_seconds_sum") for stage in ("queue", "prefill", "decode", "inference")}
    assert sums == {"queue": 3.0, "prefill": 2.0, "decode": 4.0, "inference": 6.0}


def test_tenants_add_up_to_all_requests_and_their_names_are_bounded() -> None:
    world = World()
    tenants = (("a", 2, 1), ("b", 0, 3))
    world.metrics.observe_report(StepReport((), replace(STATS, running=5, waiting=4, tenants=tenants)))
    assert world.tenants("running") == {"a": 2, "b": 0, "other": 3}
    assert world.tenants("waiting") == {"a": 1, "b": 3, "other": 0}
    for number in range(MAX_TENANT_NAMES + 10):
        busy = replace(STATS, running=1, tenants=((f"tenant-{number}", 1, 0),))
        world.metrics.observe_report(StepReport((), busy))
        world.metrics._reports.flush()
    assert world.tenants("running") == {"other": 1}
    world.metrics.observe_report(StepReport((), STATS))
    assert world.tenants("running") == world.tenants("waiting") == {"other": 0}


def test_what_the_engine_is_and_how_it_started() -> None:
    world = World()
    assert (world.get("up"), world.get("starts_total"), world.get("kv_capacity_tokens")) == (1, 1, 1024)
    assert world.get("kv_cache_bytes") == 256 * 1024
    seconds = {stage: world.get("startup_seconds", stage=stage) for stage in ("load", "warm_up", "total")}
    assert seconds == {"load": 2.0, "warm_up": 0.5, "total": 3.0}
    (model,) = [family for family in world.registry.collect() if family.name == "tokenwire_engine_model"]
    assert (model.samples[0].labels["model"], model.samples[0].labels["block_size"]) == ("m", "4")
    world.metrics.engine_ended()
    assert (world.get("up"), world.get("kv_capacity_tokens"), world.get("kv_blocks", state="free")) == (0, 0, 0)
