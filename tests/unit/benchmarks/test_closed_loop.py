"""Both closed loops, the harness's and the drivers', keep so many requests in flight and lose none."""

import asyncio
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.serving.closed_loop import OnTokens, run_closed_loop
from benchmarks.serving.drivers.closed_run import ClosedRun, Job, Progress
from benchmarks.serving.drivers.protocol import Channel, order_line, run_steps, serve_steps
from benchmarks.serving.workload import BenchRequest


def requests_of(number: int, max_tokens: int = 2) -> list[BenchRequest]:
    return [BenchRequest(key, f" {key}", (key,), max_tokens) for key in range(number)]


class Ticks:
    """A clock that moves by one at each look."""

    def __init__(self) -> None:
        self._next = count()

    def __call__(self) -> float:
        return float(next(self._next))


@pytest.mark.parametrize(("number", "concurrency"), [(1, 1), (5, 1), (7, 3), (2, 8)])
async def test_the_harness_keeps_that_many_in_flight(number: int, concurrency: int) -> None:
    in_flight: set[int] = set()
    most = 0

    async def send(request: BenchRequest, on_tokens: OnTokens) -> int:
        nonlocal most
        in_flight.add(request.key)
        most = max(most, len(in_flight))
        for _ in range(request.max_tokens):
            await asyncio.sleep(0)
            on_tokens(1)
        in_flight.remove(request.key)
        return request.max_tokens

    records = await run_closed_loop(send, requests_of(number), concurrency, Ticks())
    assert most == min(number, concurrency)
    assert sorted(record.key for record in records) == list(range(number))
    for record in records:
        assert record.tokens == 2
        times = [record.sent, *(at for at, _ in record.arrivals), record.end]
        assert times == sorted(times)


async def test_a_failure_is_its_own_requests_record() -> None:
    async def send(request: BenchRequest, on_tokens: OnTokens) -> int | None:
        on_tokens(1)
        if request.key == 1:
            raise ConnectionError("gone")
        if request.key == 2:
            await asyncio.Event().wait()
        return None

    records = await run_closed_loop(send, requests_of(4), 4, Ticks(), timeout_s=0.05)
    errors = {record.key: record.error for record in records}
    assert errors == {0: None, 1: "ConnectionError: gone", 2: "no whole answer within 0 s", 3: None}


async def test_no_clients_are_an_error() -> None:
    async def send(request: BenchRequest, on_tokens: OnTokens) -> None:
        raise AssertionError("nothing is sent")

    with pytest.raises(ValueError, match="below 1"):
        await run_closed_loop(send, requests_of(1), 0, Ticks())
    with pytest.raises(ValueError, match="below 1"):
        ClosedRun([], 0, Ticks())


@dataclass(slots=True)
class OneTokenEach:
    """A step engine that gives every job a token a step and remembers how many it held."""

    left: dict[int, int] = field(default_factory=dict)
    most: int = 0

    def add(self, job: Job) -> None:
        assert job.key not in self.left
        self.left[job.key] = job.max_tokens
        self.most = max(self.most, len(self.left))

    def step(self) -> Iterable[Progress]:
        for key in list(self.left):
            self.left[key] -= 1
            is_over = self.left[key] == 0
            if is_over:
                del self.left[key]
            yield Progress(key, 1, is_over)


@given(st.lists(st.integers(1, 5), max_size=20), st.integers(1, 8))
def test_a_driver_keeps_that_many_in_flight(lengths: list[int], concurrency: int) -> None:
    engine = OneTokenEach()
    jobs = [Job(key, (key,), length) for key, length in enumerate(lengths)]
    run = ClosedRun(jobs, concurrency, Ticks())
    run_steps(engine, run)
    assert {record.key: record.num_tokens for record in run.records} == dict(enumerate(lengths))
    assert engine.most == min(concurrency, len(lengths))
    assert run.is_done


def test_a_driver_answers_each_order_and_ends_with_its_input() -> None:
    orders = [[Job(0, (5, 6), 3)], [Job(0, (7,), 1), Job(1, (8,), 2)]]
    source = io.StringIO("".join(order_line(jobs, 2) for jobs in orders))
    sink = io.StringIO()
    serve_steps(OneTokenEach(), Channel(source, sink), "engine 1.0")
    ready, first, second = [json.loads(line) for line in sink.getvalue().splitlines()]
    assert ready == {"ready": True, "version": "engine 1.0"}
    assert [len(record["arrivals"]) for record in first["records"]] == [3]
    assert {record["key"]: len(record["arrivals"]) for record in second["records"]} == {0: 1, 1: 2}


def test_an_error_of_a_job_is_in_its_record() -> None:
    run = ClosedRun([Job(4, (1,), 8)], 1, Ticks())
    run.take()
    run.note(Progress(4, 0, finished=True, error="it was too long"))
    assert [(record.error, record.arrivals) for record in run.records] == [("it was too long", ())]
    with pytest.raises(KeyError):
        run.note(Progress(4, 1, finished=False))
