"""Fair sharing: the queue against a slow plain virtual token counter, and service counted from the plans."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.core.fairness import OUTPUT_COST, PROMPT_COST, FairShares
from engine_service.core.plan import Plan
from engine_service.core.request import Request
from engine_service.core.scheduler import SLACK_STEPS
from engine_service.core.waiting import WaitingQueue
from tests.unit.core.core_driver import Engine, config, prompt_of, request

OPERATIONS = st.lists(
    st.tuples(st.just("submit"), st.integers(0, 4), st.integers(0, 1))
    | st.tuples(st.just("take"), st.integers(0, 20), st.integers(0, 20))
    | st.tuples(st.just("abort"), st.integers(0, 20), st.just(0)),
    max_size=60,
)
WEIGHTS = (1, 2, 3, 1, 5)


class PlainCounter:
    """The paper's algorithm over lists, one instance for each priority."""

    def __init__(self) -> None:
        self.counters: dict[str, float] = {}
        self.queue: list[Request] = []
        self.last = ""

    def submit(self, item: Request, tenant: str) -> None:
        waiting = [self.counters[other.account.tenant.name] for other in self.queue]
        own = self.counters.get(tenant, 0.0)
        if all(other.account.tenant.name != tenant for other in self.queue):
            own = max(own, min(waiting) if waiting else self.counters.get(self.last, 0.0))
        self.counters[tenant] = own
        self.queue.append(item)

    def leave(self, item: Request) -> None:
        self.queue.remove(item)
        tenant = item.account.tenant.name
        if all(other.account.tenant.name != tenant for other in self.queue):
            self.last = tenant

    def charge(self, item: Request, prompt: int, generated: int) -> None:
        tenant = item.account.tenant
        self.counters[tenant.name] += (PROMPT_COST * prompt + OUTPUT_COST * generated) / tenant.weight

    def may_be_next(self, item: Request) -> bool:
        """The least served tenant's first; of equally served ones any."""
        tenant = item.account.tenant.name
        firsts = [other for other in self.queue if other.account.tenant.name == tenant]
        least = min(self.counters[other.account.tenant.name] for other in self.queue)
        return item is firsts[0] and self.counters[tenant] == pytest.approx(least)


@given(OPERATIONS)
@settings(deadline=None, max_examples=200)
def test_queue_is_the_plain_virtual_token_counter(operations: list[tuple[str, int, int]]) -> None:
    shares, queue, plain = FairShares(4), WaitingQueue(), (PlainCounter(), PlainCounter())
    live: list[Request] = []
    for number, (what, first, second) in enumerate(operations):
        if what == "submit":
            item = request(number, [1] * (1 + first), priority=second)
            item.account = shares.account(f"t{first}", WEIGHTS[first], second, 0.0)
            plain[second].submit(item, f"t{first}")
            queue.add(item)
            live.append(item)
        elif what == "abort" and live:
            item = live.pop(first % len(live))
            plain[item.priority].leave(item)
            queue.remove(item)
        elif what == "take" and live:
            turns = queue.turns(shares)
            item = turns.next()
            assert item is not None
            assert item.priority == min(other.priority for other in live)
            assert plain[item.priority].may_be_next(item)
            live.remove(item)
            plain[item.priority].leave(item)
            queue.remove(item)
            item.account.charge(first, second)
            plain[item.priority].charge(item, first, second)
            turns.close()
    assert len(queue) == len(live)
    assert queue.num_tenants == len({item.account.tenant.name for item in live})


def services(plans: list[Plan], owners: dict[int, str], prompts: dict[int, int]) -> "Counter[str]":
    """What each tenant has been served, from the plans alone: computed prompt positions and samples."""
    served: Counter[str] = Counter()
    for plan in plans:
        for chunk in plan.chunks:
            prompt = max(0, min(chunk.start + chunk.length, prompts[chunk.request_id]) - chunk.start)
            served[owners[chunk.request_id]] += PROMPT_COST * prompt + OUTPUT_COST * chunk.samples
    return served


@given(
    st.lists(st.sampled_from([1, 2, 3, 4]), min_size=2, max_size=4),
    st.lists(st.tuples(st.integers(1, 24), st.integers(1, 20)), min_size=4, max_size=4),
    st.integers(2, 6),
    st.integers(0, 1),
)
@settings(deadline=None, max_examples=40)
def test_backlogged_tenants_stay_within_a_bound_of_each_other(
    weights: list[int], shapes: list[tuple[int, int]], slots: int, depth: int
) -> None:
    """Each tenant has a shape of its own. Theorem 4.3 of the paper: |service_i / w_i - service_j / w_j| is bounded by
    2 max(PROMPT_COST * longest prompt, OUTPUT_COST * tokens of a full batch) / least weight, at any time; and the slack
    of those within their share of the slots."""
    engine = Engine(config(num_blocks=256, max_num_requests=slots, prefix_cache=False), depth=depth)
    owners: dict[int, str] = {}
    prompts: dict[int, int] = {}
    number = 0

    def fill() -> None:
        nonlocal number
        for tenant, weight in enumerate(weights):
            prompt, max_tokens = shapes[tenant]
            waiting = sum(i.account.tenant.name == f"t{tenant}" for i in engine.scheduler._roster.waiting.all())
            for _ in range(slots + 1 - waiting):
                number += 1
                owners[number], prompts[number] = f"t{tenant}", prompt
                item = request(
                    number, prompt_of(prompt, number), max_tokens, tenant=f"t{tenant}", weight=weight, arrival=0.0
                )
                assert engine.scheduler.submit(item) is None

    slack = SLACK_STEPS * 16
    bound = (2 * max(PROMPT_COST * 24, OUTPUT_COST * slots * 20) + slack) / min(weights)
    for _ in range(60):
        fill()
        engine.step()
        served = services(engine.plans, owners, prompts)
        normalised = [served[f"t{tenant}"] / weight for tenant, weight in enumerate(weights)]
        assert max(normalised) - min(normalised) <= bound, (normalised, bound)
    engine.scheduler.check_invariants()


def flood(engine: Engine, first: int, count: int, tenant: str, **more: Any) -> dict[int, str]:
    for number in range(first, first + count):
        assert engine.scheduler.submit(request(number, prompt_of(8, number), 16, tenant=tenant, **more)) is None
    return dict.fromkeys(range(first, first + count), tenant)


def test_weights_of_1_2_and_4_are_respected_within_ten_percent() -> None:
    """Generated tokens of three backlogged tenants, counted while all of them have a queue."""
    engine = Engine(config(num_blocks=512, max_num_requests=14, max_waiting_requests=4096, max_waiting_tokens=10**6))
    owners: dict[int, str] = {}
    for place, (tenant, weight) in enumerate((("a", 1), ("b", 2), ("c", 4))):
        owners |= flood(engine, 1000 * place, 600, tenant, weight=weight, arrival=0.0, ignore_eos=True)
    for _ in range(600):
        engine.step()
    assert all(tenant.waiting for tenant in engine.scheduler._shares.tenants())
    tokens = Counter(owners[chunk.request_id] for plan in engine.plans for chunk in plan.chunks if chunk.samples)
    part = sum(tokens.values()) / 7
    assert [tokens[name] / part for name in "abc"] == pytest.approx([1, 2, 4], rel=0.1), tokens


def first_token_steps(engine: Engine, numbers: list[int], every: int) -> list[int]:
    """Submits requests of tenant "b", one every so many steps; steps from each one's arrival to its first sample."""
    arrived: dict[int, int] = {}
    for step in range(every * len(numbers) + 200):
        if step % every == 0 and step // every < len(numbers):
            number = numbers[step // every]
            item = request(number, prompt_of(8, number), 4, tenant="b", arrival=engine.now, ignore_eos=True)
            assert engine.scheduler.submit(item) is None
            arrived[number] = len(engine.plans)
        engine.step()
    sampled = {
        number: next(
            place
            for place, plan in enumerate(engine.plans)
            if any(c.request_id == number and c.samples for c in plan.chunks)
        )
        for number in numbers
    }
    return [1 + sampled[number] - arrived[number] for number in numbers]


@pytest.mark.parametrize("prefill_per_decode", [0, 4])
def test_a_flood_does_not_delay_the_first_tokens_of_another_tenant(prefill_per_decode: int) -> None:
    """b sends at its share; a has 300 requests waiting all the time. Counted in steps, b alone beside b with a."""
    settings_ = {"num_blocks": 512, "max_num_requests": 8, "prefill_chunk_size": 8, "step_token_budget": 32}
    settings_ |= {"max_waiting_requests": 4096, "max_waiting_tokens": 10**6, "prefill_per_decode": prefill_per_decode}
    numbers = list(range(5000, 5030))
    alone = first_token_steps(Engine(config(**settings_)), numbers, 6)
    engine = Engine(config(**settings_))
    flood(engine, 1, 300, "a", arrival=0.0, ignore_eos=True)
    assert engine.scheduler.submit(request(4999, [1], 1, tenant="b", arrival=0.0)) is None  # present from the start
    beside = first_token_steps(engine, numbers, 6)
    assert alone == [1] * len(numbers)
    assert max(beside) <= 2, beside
    assert any(tenant.waiting for tenant in engine.scheduler._shares.tenants())


def test_a_new_tenant_gets_the_next_slots_that_become_free() -> None:
    """a holds all slots when b, unknown until now, brings more than fit: every slot is b's until b has its share."""
    engine = Engine(config(num_blocks=512, max_num_requests=8, max_waiting_requests=999, max_waiting_tokens=10**6))
    flood(engine, 1, 100, "a", arrival=0.0, ignore_eos=True)
    for _ in range(12):
        engine.step()
    assert len(engine.scheduler._roster.running) == 8
    flood(engine, 500, 20, "b", arrival=0.0, ignore_eos=True)
    seen = len(engine.plans)
    while sum(len(plan.new) for plan in engine.plans[seen:]) < 4:
        engine.step()
    admitted = [new.request_id for plan in engine.plans[seen:] for new in plan.new]
    assert [number >= 500 for number in admitted[:4]] == [True] * 4


def test_the_most_served_tenant_is_preempted_first() -> None:
    """Blocks run out: b, who came later but was served little, keeps its place; without tenants it would lose it."""

    def preempted(tenant: str) -> list[str]:
        engine = Engine(config(num_blocks=16, max_num_requests=4, prefix_cache=False))
        owners = {1: "a", 2: "a", 3: tenant}
        for number in (1, 2):
            item = request(number, prompt_of(16, number), 28, tenant="a", ignore_eos=True)
            assert engine.scheduler.submit(item) is None
        for _ in range(6):
            engine.step()
        last = request(3, [5], 28, tenant=tenant, ignore_eos=True)
        assert engine.scheduler.submit(last) is None
        lost = []
        while engine.scheduler.has_work:
            engine.step()
            record = engine.scheduler.last_record
            lost += [owners[number] for number in record.preempted if record is not None]
        return lost

    assert preempted("b")[0] == "a"
    assert preempted("a")  # there is pressure


def test_a_flood_leaves_places_in_the_queue_to_others() -> None:
    engine = Engine(config(max_waiting_requests=40, max_waiting_tokens=400))
    taken = 0
    for number in range(1, 60):
        refusal = engine.scheduler.submit(request(number, [1, 2], tenant="a", arrival=0.0))
        if refusal is not None:
            break
        taken += 1
    assert taken == 30
    assert refusal is not None
    assert all(part in refusal.message for part in ("30 requests", "30 of 40")), refusal.message
    for number in range(100, 110):
        assert engine.scheduler.submit(request(number, [1, 2], tenant="b", arrival=0.0)) is None
    assert engine.scheduler.submit(request(200, [1, 2], tenant="b", arrival=0.0)) is not None


def test_the_nameless_tenant_alone_fills_the_whole_queue() -> None:
    engine = Engine(config(max_waiting_requests=40))
    for number in range(40):
        assert engine.scheduler.submit(request(number, [1, 2])) is None
    refusal = engine.scheduler.submit(request(40, [1, 2]))
    assert refusal is not None
    assert refusal.retry_after_s == 1.0


def test_tenants_without_requests_are_forgotten_and_bounded() -> None:
    shares = FairShares(8)
    for number in range(3000):
        shares.account(f"t{number}", 2, 0, float(number) / 1000)
    assert len(shares.tenants()) <= 1025
    assert shares.total_weight == 2 * len(shares.tenants())
    shares.expire(40.0)
    assert len(shares.tenants()) == 1
    for priority in range(1000):
        shares.account("t2999", 2, priority, 40.0)
    assert len(shares.tenants()[0].accounts) <= 64
