"""The generator in virtual time: coordinated omission, lag, limits, and that nothing is lost."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fixtures.virtual_time import VirtualLoop, run_virtually
from tokenwire_client.load.arrivals import ArrivalKind, Pace, schedule
from tokenwire_client.load.generator import Generator, Limits
from tokenwire_client.load.lengths import Fixed
from tokenwire_client.load.outcomes import Part, RequestFailed
from tokenwire_client.load.recorder import Recorder, Targets
from tokenwire_client.load.results import Round
from tokenwire_client.load.workload import LoadRequest, Shape, Workload

SERVICE_S = 0.01


class FakeTarget:
    """Answers 4 tokens after `delay_of` (seconds above 0, by number); an infinite delay never answers."""

    def __init__(self, delay_of: Callable[[int], float], fails: Callable[[int], bool] = lambda _: False) -> None:
        self.seen: list[int] = []
        self.left: list[int] = []
        self._delay_of = delay_of
        self._fails = fails

    async def stream(self, request: LoadRequest) -> AsyncGenerator[Part, None]:
        self.seen.append(request.number)
        try:
            await asyncio.sleep(min(self._delay_of(request.number), 1e9))
            if self._fails(request.number):
                raise RequestFailed("http_500", "it broke")
            for _ in range(4):
                yield Part(1)
            yield Part(0, 10, 4, 0)
        except (asyncio.CancelledError, GeneratorExit):
            self.left.append(request.number)
            raise

    async def close(self) -> None: ...


def measured(
    target: FakeTarget,
    limits: Limits,
    *,
    rate: float = 100.0,
    clients: int = 0,
    shape: Shape | None = None,
    warmup: float = 0.0,
    stop_at: float | None = None,
    targets: Targets | None = None,
) -> Round:
    loop = VirtualLoop()

    async def run() -> Round:
        workload = Workload(shape or Shape(Fixed(3), Fixed(4)), 1)
        recorder = Recorder(0.0, warmup, targets or Targets(), [""], 1)
        generator = Generator(target, workload.request, limits, recorder, loop.time)
        if stop_at is not None:
            loop.call_at(stop_at, generator.stop)
        if clients:
            await generator.run_closed(clients, 0.0)
        else:
            await generator.run_open(schedule(Pace(ArrivalKind.CONSTANT, rate), 1), 0.0)
        return recorder.result(limits.seconds if limits.requests is None else None, rate, stop_at is not None)

    return run_virtually(run(), loop)


def assert_adds_up(found: Round) -> None:
    counts = found.counts
    assert counts.intended == counts.sent + counts.not_sent
    assert counts.sent == counts.ok + counts.cancelled + counts.abandoned + counts.failed
    assert counts.good <= counts.ok


class StallingTarget(FakeTarget):
    """Immediate but for one second, from 1.0 to 2.0: whoever comes then is answered at 2.0."""

    def __init__(self) -> None:
        super().__init__(lambda _: SERVICE_S)

    async def stream(self, request: LoadRequest) -> AsyncGenerator[Part, None]:
        now = asyncio.get_running_loop().time()
        if 1.0 <= now < 2.0:
            await asyncio.sleep(2.0 - now)
        async for part in super().stream(request):
            yield part


def test_a_stall_is_charged_for_everybody_who_would_have_come() -> None:
    """100 requests a second for 3 s, one second of stall: those of that second wait 1.0, 0.99, ... 0.01 s longer."""
    found = measured(StallingTarget(), Limits(None, 3.0))
    assert found.counts.ok == 300
    slow = sorted(ttft for _, ttft in found.dots)[-100:]
    assert slow == pytest.approx([SERVICE_S + 0.01 * number for number in range(1, 101)], abs=0.001)
    # The 99th percentile of 300 is the 297th value, the 97th of the slow ones.
    assert found.ttft.p99 == pytest.approx(SERVICE_S + 0.97, rel=0.002)
    assert found.e2e.most == pytest.approx(SERVICE_S + 1.0, rel=0.002)


def test_a_stall_is_charged_also_when_the_in_flight_limit_blocks_the_generator() -> None:
    """Sends beyond the limit are not made, and counted."""
    found = measured(StallingTarget(), Limits(None, 3.0, in_flight=20))
    # 20 are stuck until 2.01 s; the other 80 of that second, and those of 2.00 and 2.01, are not sent.
    assert found.counts.not_sent == 82
    assert found.counts.good_share == pytest.approx(218 / 300)
    assert any("82 requests were not sent" in note for note in found.notes)
    assert_adds_up(found)


def test_a_closed_loop_does_not_see_the_stall() -> None:
    """The contrast: one client loses a second once, so one value of many is slow."""
    found = measured(StallingTarget(), Limits(None, 3.0), clients=1)
    assert sum(ttft > 0.5 for _, ttft in found.dots) == 1
    assert found.ttft.p99 < 0.02


def test_a_generator_that_is_late_says_so_and_counts_from_the_intended_start() -> None:
    """The program itself computes for half a second at its 50th request."""

    class Busy(FakeTarget):
        async def stream(self, request: LoadRequest) -> AsyncGenerator[Part, None]:
            if request.number == 50:
                loop = asyncio.get_running_loop()
                assert isinstance(loop, VirtualLoop)
                loop.now += 0.5
            async for part in super().stream(request):
                yield part

    found = measured(Busy(lambda _: SERVICE_S), Limits(None, 2.0))
    assert found.lag.most == pytest.approx(0.49, abs=0.02)
    assert found.ttft.most == pytest.approx(0.51, abs=0.02)
    assert any("fell behind" in note for note in found.notes)
    assert found.counts.sent == 200


def test_a_generator_in_time_has_no_lag() -> None:
    found = measured(FakeTarget(lambda _: SERVICE_S), Limits(None, 2.0))
    assert found.lag.most < 0.001
    assert found.notes == ()


def test_the_warm_up_is_in_no_figure() -> None:
    found = measured(FakeTarget(lambda number: 0.5 if number < 100 else SERVICE_S), Limits(None, 3.0), warmup=1.0)
    assert (found.warmup, found.counts.intended, found.window_s) == (100, 200, pytest.approx(2.0))
    assert found.ttft.most < 0.02
    # What began before and arrives inside is work of the window: of 50 requests 4 tokens each.
    assert found.rates.tokens == pytest.approx((200 + 50 - 1) * 4 / 2.0, rel=0.02)


def test_a_run_by_number_ends_after_it() -> None:
    target = FakeTarget(lambda _: SERVICE_S)
    assert measured(target, Limits(17, None)).counts.ok == 17
    assert target.seen == list(range(17))


@pytest.mark.parametrize("clients", [1, 3, 8])
def test_a_closed_loop_keeps_so_many_in_flight(clients: int) -> None:
    running, most = 0, 0

    class Counting(FakeTarget):
        async def stream(self, request: LoadRequest) -> AsyncGenerator[Part, None]:
            nonlocal running, most
            running += 1
            most = max(most, running)
            async for part in super().stream(request):
                yield part
            running -= 1

    found = measured(Counting(lambda _: 0.1), Limits(None, 10.0), clients=clients)
    assert most == clients
    assert found.rates.ok == pytest.approx(clients * 10, rel=0.03)


def test_a_request_without_end_is_an_error_and_one_after_the_wait_is_abandoned() -> None:
    found = measured(FakeTarget(lambda _: float("inf")), Limits(5, None, timeout_s=3.0))
    assert found.counts.errors == {"timeout": 5}
    target = FakeTarget(lambda _: float("inf"))
    found = measured(target, Limits(5, None, drain_s=2.0))
    assert found.counts.abandoned == 5
    assert sorted(target.left) == [0, 1, 2, 3, 4]
    assert any("the true tail is longer" in note for note in found.notes)


def test_goodput_counts_whole_answers_within_the_targets() -> None:
    targets = Targets(ttft=0.05)
    target = FakeTarget(lambda number: 0.1 if number % 4 == 0 else SERVICE_S, lambda number: number % 4 == 1)
    found = measured(target, Limits(None, 4.0), targets=targets)
    assert (found.counts.ok, found.counts.good, found.counts.failed) == (300, 200, 100)
    assert found.counts.good_share == 0.5
    assert found.error_examples == {"http_500": "it broke"}


def test_a_fault_of_the_target_loses_no_request() -> None:
    def broken(number: int) -> bool:
        raise ZeroDivisionError("a bug")

    found = measured(FakeTarget(lambda _: SERVICE_S, broken), Limits(5, None))
    assert found.counts.errors == {"load_generator": 5}
    assert found.error_examples == {"load_generator": "ZeroDivisionError: a bug"}


def test_cancelled_requests_are_left_at_their_token() -> None:
    target = FakeTarget(lambda _: SERVICE_S)
    found = measured(target, Limits(50, None), shape=Shape(Fixed(3), Fixed(4), cancel_share=1.0))
    assert found.counts.cancelled == 50
    assert sorted(target.left) == list(range(50))


@settings(max_examples=40, deadline=None)
@given(
    delays=st.lists(st.sampled_from([0.001, 0.003, 0.05, 0.7, float("inf")]), min_size=1, max_size=5),
    failing=st.integers(1, 6),
    cancel_share=st.sampled_from([0.0, 0.4, 1.0]),
    in_flight=st.integers(1, 12),
    stop_at=st.none() | st.floats(0.0, 2.0),
    clients=st.integers(0, 6),
    requests=st.none() | st.integers(1, 60),
)
def test_nothing_is_lost(
    delays: list[float],
    failing: int,
    cancel_share: float,
    in_flight: int,
    stop_at: float | None,
    clients: int,
    requests: int | None,
) -> None:
    target = FakeTarget(lambda number: delays[number % len(delays)], lambda number: number % failing == 1)
    limits = Limits(requests, 1.0, in_flight=max(in_flight, clients), timeout_s=5.0, drain_s=3.0)
    shape = Shape(Fixed(3), Fixed(4), cancel_share=cancel_share)
    found = measured(target, limits, rate=30.0, clients=clients, shape=shape, stop_at=stop_at)
    assert_adds_up(found)
    assert found.counts.sent == len(target.seen)
    if not clients:
        times: Iterator[float] = schedule(Pace(ArrivalKind.CONSTANT, 30.0), 1)
        due = len(list(takewhile(lambda at: at < min(1.0, 9.0 if stop_at is None else stop_at), times)))
        assert abs(found.counts.intended - min(due, requests or due)) <= (stop_at is not None)


@pytest.mark.parametrize(
    "fields",
    [
        {"requests": None, "seconds": None},
        {"requests": 0, "seconds": None},
        {"requests": 1, "seconds": -1.0},
        {"requests": 1, "seconds": None, "in_flight": 0},
        {"requests": 1, "seconds": None, "drain_s": 0.0},
    ],
)
def test_what_is_no_limit_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"outside|below|at least|needs"):
        Limits(**fields)  # type: ignore[arg-type]
