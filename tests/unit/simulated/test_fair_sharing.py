"""Fair sharing in virtual time: the real scheduler, the step times of a model, clients in closed loops.

The same acceptance with real services on a quiet machine: tests/load/test_fair_sharing.py.
"""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from engine_service.core.plan import Result
from engine_service.core.scheduler import Scheduler, SchedulerConfig
from engine_service.simulated.step_model import StepModel, StepWork
from tests.fixtures.tenant_load import percentile
from tests.unit.core.core_driver import request

CPU = StepModel(0.010, 0.0005, 0.0006, 2e-7, 1e-7)  # of a 135M model on two cores
LOAD = 0.8  # of its share: at the whole of it the queue of random arrivals has no end


@dataclass
class Virtual:
    """One engine. `clients` are a tenant's closed loops, `arrivals` its requests in a second at random times; each
    request draws its lengths.
    """

    slots: int
    steps: StepModel
    prefill_per_decode: int
    clients: dict[str, int]
    weights: dict[str, int] = field(default_factory=dict)
    arrivals: dict[str, float] = field(default_factory=dict)
    prompt: tuple[int, int] = (64, 192)
    output: tuple[int, int] = (16, 48)
    now: float = 0.0
    ttfts: dict[str, list[float]] = field(default_factory=dict)
    tokens: "Counter[str]" = field(default_factory=Counter)

    def run(self, seconds: float, warm_up: float = 5.0) -> None:
        self.dice = random.Random(7)
        self.scheduler = Scheduler(
            SchedulerConfig(
                block_size=16,
                num_blocks=4096,
                step_token_budget=512,
                prefill_chunk_size=512,
                max_num_requests=self.slots,
                max_waiting_requests=2048,
                max_waiting_tokens=4_000_000,
                max_model_len=8192,
                eos_token_ids=frozenset(),
                prefix_cache=False,
                prefill_per_decode=self.prefill_per_decode,
            )
        )
        self.owners: dict[int, tuple[str, float]] = {}
        self.began: set[int] = set()
        for tenant, count in self.clients.items():
            self.ttfts[tenant] = []
            for _ in range(count):
                self.send(tenant)
        self.due = sorted(time for tenant in self.arrivals for time in self.times(tenant, seconds))
        while self.now < seconds:
            while self.due and self.due[0][0] <= self.now:
                self.send(*reversed(self.due.pop(0)))
            self.step(counts=self.now > warm_up)

    def times(self, tenant: str, seconds: float) -> list[tuple[float, str]]:
        """A Poisson process."""
        self.ttfts[tenant] = []
        found = [(self.dice.expovariate(self.arrivals[tenant]), tenant)]
        while found[-1][0] < seconds:
            found.append((found[-1][0] + self.dice.expovariate(self.arrivals[tenant]), tenant))
        return found

    def send(self, tenant: str, arrival: float | None = None) -> None:
        number = len(self.owners)
        prompt = [1] * self.dice.randint(*self.prompt)
        item = request(
            number,
            prompt,
            self.dice.randint(*self.output),
            arrival=self.now,
            tenant=tenant,
            weight=self.weights.get(tenant, 1),
            ignore_eos=True,
        )
        assert self.scheduler.submit(item) is None
        self.owners[number] = tenant, self.now if arrival is None else arrival

    def step(self, counts: bool) -> None:
        plan = self.scheduler.plan(self.now)
        if plan is None:  # idle until the next arrival
            self.now = self.due[0][0]
            return
        self.now += self.steps.seconds(StepWork.of(plan.chunks))
        sampled = tuple((chunk.request_id, 5) for chunk in plan.chunks if chunk.samples)
        self.scheduler.apply(Result(plan.step, sampled))
        for number, _ in sampled:
            tenant, arrived = self.owners[number]
            self.tokens[tenant] += counts
            if number not in self.began:
                self.began.add(number)
                if counts:
                    self.ttfts[tenant].append(self.now - arrived)
        for news in self.scheduler.take_news():
            if news.finish is not None and self.owners[news.request_id][0] in self.clients:
                self.send(self.owners[news.request_id][0])


@pytest.mark.parametrize(
    ("slots", "prefill_per_decode"), [(8, 4), (16, 4), (16, 0)], ids=["8", "16", "16-unbounded-prefill"]
)
def test_ten_times_the_share_leaves_the_other_its_first_tokens(slots: int, prefill_per_decode: int) -> None:
    """b sends LOAD of half the requests that the engine can serve, at random times; a has ten times as many clients as
    its half of the slots. b's TTFT p99 stays within 1.5 times of its value alone."""
    full = Virtual(slots, CPU, prefill_per_decode, {"a": 10 * slots})
    full.run(60.0)
    rate = LOAD * len(full.ttfts["a"]) / 55.0 / 2
    alone = Virtual(slots, CPU, prefill_per_decode, {}, arrivals={"b": rate})
    alone.run(120.0)
    beside = Virtual(slots, CPU, prefill_per_decode, {"a": 10 * slots // 2}, arrivals={"b": rate})
    beside.run(120.0)
    p99 = percentile(alone.ttfts["b"], 0.99), percentile(beside.ttfts["b"], 0.99)
    print(f"TTFT p99 of b: alone {p99[0] * 1e3:.1f} ms, beside {p99[1] * 1e3:.1f} ms, {p99[1] / p99[0]:.2f} times")
    assert min(len(alone.ttfts["b"]), len(beside.ttfts["b"])) > 100
    assert p99[1] <= 1.5 * p99[0], p99
    assert percentile(beside.ttfts["a"], 0.5) > 3 * p99[1]  # a waits for its own queue


def test_without_tenants_the_flood_would_be_everybodys() -> None:
    """The same load in one tenant: a first token takes many times as long."""
    mixed = Virtual(8, CPU, 4, {"": 44})
    mixed.run(60.0)
    assert percentile(mixed.ttfts[""], 0.5) > 1.0


def test_weights_of_1_2_and_4_within_ten_percent_of_tokens() -> None:
    weights = {"a": 1, "b": 2, "c": 4}
    engine = Virtual(14, CPU, 4, dict.fromkeys(weights, 20), weights)
    engine.run(90.0)
    part = engine.tokens.total() / 7
    shares = {name: engine.tokens[name] / part for name in weights}
    print("tokens per unit of weight:", shares)
    assert list(shares.values()) == pytest.approx([1, 2, 4], rel=0.1), engine.tokens
