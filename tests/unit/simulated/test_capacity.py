"""Fleets in virtual time against queueing theory's own recursion, and the answers drawn from them."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.core.scheduler import SchedulerConfig
from engine_service.simulated.capacity import CapacityPlanner, Goal, Outcome, Workload, quantile
from engine_service.simulated.fleet import Arrival, Fleet, VirtualEngine
from engine_service.simulated.step_model import StepModel

MODEL = StepModel(0.010, 0.0005, 0.0006, 0.0, 0.0)


def config(max_num_requests: int = 64, **changes: int) -> SchedulerConfig:
    sizes = {"num_blocks": 2048, "max_waiting_requests": 1000, "prefill_per_decode": 0} | changes
    return SchedulerConfig(
        block_size=32,
        step_token_budget=512,
        prefill_chunk_size=512,
        max_num_requests=max_num_requests,
        max_waiting_tokens=10_000_000,
        max_model_len=8192,
        eos_token_ids=frozenset(),
        prefix_cache=True,
        **sizes,
    )


def lindley(arrivals: Sequence[Arrival], service: float) -> list[float]:
    """Ends of first come, first served by one server that takes the same time for each (Lindley's recursion)."""
    ends: list[float] = []
    for arrival in arrivals:
        ends.append(max(arrival.at, ends[-1] if ends else 0.0) + service)
    return ends


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.0, 0.2), min_size=1, max_size=40))
def test_one_request_at_a_time_is_the_textbook_queue(gaps: list[float]) -> None:
    now, arrivals = 0.0, []
    for number, gap in enumerate(gaps):
        now += gap
        arrivals.append(Arrival(now, range(number * 200, number * 200 + 100), 3))
    records, end = Fleet([VirtualEngine(config(max_num_requests=1), MODEL)]).run(arrivals)
    service = (0.010 + 100 * 0.0006) + 2 * (0.010 + 0.0005)
    assert [record.last_token_at for record in records] == pytest.approx(lindley(arrivals, service))
    assert end == pytest.approx(records[-1].last_token_at)
    assert all(record.num_tokens == 3 for record in records)


def test_requests_share_steps() -> None:
    """Two at once: one step for both prompts, then both decode together."""
    arrivals = [Arrival(0.0, range(100), 2), Arrival(0.0, range(500, 600), 2)]
    records, end = Fleet([VirtualEngine(config(), MODEL)]).run(arrivals)
    # The first arrival starts a step at once; the second joins the next, beside its decode.
    first = 0.010 + 100 * 0.0006
    assert records[0].ttft == pytest.approx(first)
    assert records[1].ttft == pytest.approx(2 * first + 0.0005)
    assert end == pytest.approx(2 * first + 0.0005 + 0.0105)


def test_work_goes_to_the_engine_with_less() -> None:
    arrivals = [Arrival(0.0, range(number * 200, number * 200 + 100), 5) for number in range(4)]
    fleet = Fleet([VirtualEngine(config(), MODEL) for _ in range(4)])
    records, _ = fleet.run(arrivals)
    assert len({record.ttft for record in records}) == 1
    assert len({engine.busy_seconds for engine in fleet.engines}) == 1


def test_a_full_queue_refuses() -> None:
    arrivals = [Arrival(0.0, range(number * 200, number * 200 + 100), 5) for number in range(10)]
    records, _ = Fleet([VirtualEngine(config(1, max_waiting_requests=3), MODEL)]).run(arrivals)
    refused = [record for record in records if record.refusal is not None]
    assert len(refused) == 6  # one runs, three wait
    assert all(record.num_tokens == 5 for record in records if record.refusal is None)


def test_shared_prefixes_save_work() -> None:
    def p50(shared: int) -> float:
        planner = CapacityPlanner(MODEL, config(), Workload(400, 8, 0.0, shared, 60), Goal(1.0, 0.1))
        return planner.outcome(1, 2.0).ttft_p50

    assert p50(384) < p50(0) / 2


def planner(**changes: int) -> CapacityPlanner:
    return CapacityPlanner(MODEL, config(**changes), Workload(100, 16, num_requests=120), Goal(0.5, 0.05))


def test_the_answers_agree_with_the_runs() -> None:
    runs: list[Outcome] = []
    rate = planner().highest_rate(1, runs.append)
    assert planner().outcome(1, rate).meets(planner().goal)
    assert any(not run.meets(planner().goal) for run in runs)
    assert min(run.rate for run in runs if not run.meets(planner().goal)) < rate * 1.05
    needed = planner().engines_for(rate * 2.5, lambda _: None)
    assert needed is not None
    assert planner().outcome(needed, rate * 2.5).meets(planner().goal)
    assert not planner().outcome(needed - 1, rate * 2.5).meets(planner().goal)


def test_a_goal_below_the_step_time_is_never_met() -> None:
    strict = CapacityPlanner(MODEL, config(), Workload(100, 16, num_requests=20), Goal(0.001, 0.05))
    assert strict.highest_rate(1, lambda _: None) == 0.0
    assert strict.engines_for(1.0, lambda _: None) is None


def test_quantiles_are_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert quantile(values, 0.5) == 50.0
    assert quantile(values, 0.99) == 99.0
    assert quantile([7.0], 0.99) == 7.0
    assert quantile([], 0.5) == 0.0
