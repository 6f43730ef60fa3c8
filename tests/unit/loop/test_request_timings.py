"""The stages of a request: which it reached, and that together they are its time in the engine process."""

from dataclasses import replace

from engine_service.core.outcome import Finish, FinishReason, RequestNews
from engine_service.core.plan import NewRequest, Plan
from engine_service.core.sampling import SamplingParams
from engine_service.loop.messages import RequestTiming
from engine_service.loop.request_timings import RequestTimings

END = Finish(FinishReason.LENGTH, 3, 2, 0)


def plan(*names: int) -> Plan:
    sampling = SamplingParams(2, seed=1, temperature=0.0)
    return Plan(1, (), tuple(NewRequest(name, (7, 8, 9), 3, (0,), sampling) for name in names))


def test_each_stage_ends_where_the_next_begins() -> None:
    timings = RequestTimings(lambda: 0)
    timings.arrived(1, 10.0)
    timings.planned(plan(1), 12.0)
    assert timings.settle((RequestNews(1, (5,)),), 15.0) == ()
    timings.planned(plan(1), 16.0)  # it comes back after a preemption
    assert timings.settle((RequestNews(1, (6,), END),), 20.0) == (RequestTiming(1, 2.0, 3.0, 5.0),)
    assert timings.settle((RequestNews(1, (), END),), 21.0) == ()


def test_an_end_in_the_queue_or_in_the_prefill_leaves_the_later_stages_out() -> None:
    timings = RequestTimings(lambda: 0)
    for name in (1, 2, 3):
        timings.arrived(name, 10.0)
    timings.planned(plan(2, 3), 12.0)
    ends = tuple(RequestNews(name, (5,) if name == 3 else (), END) for name in (1, 2, 3))
    assert timings.settle(ends, 17.0) == (
        RequestTiming(1, 7.0, None, None),
        RequestTiming(2, 2.0, 5.0, None),
        RequestTiming(3, 2.0, 5.0, 0.0),
    )


def test_steps_and_preemptions_are_those_of_the_stages() -> None:
    timings = RequestTimings(lambda: 42)
    timings.arrived(1, 10.0)
    timings.last_step = 3
    timings.planned(replace(plan(1), step=4), 12.0)
    timings.last_step = 5  # two chunks
    timings.settle((RequestNews(1, (5,)),), 13.0)
    timings.preempted((1, 7))
    timings.last_step = 9
    (timing,) = timings.settle((RequestNews(1, (6,), END),), 15.0)
    assert (timing.arrived_ns, timing.prefill_steps, timing.decode_steps, timing.preemptions) == (42, 2, 4, 1)
