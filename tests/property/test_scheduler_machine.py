"""State machine: submit, plan, settle, abort and pass deadlines at any moment; every stream stays exact.

Submissions have one or more samples of a prompt, a priority and a tenant.

The device checks each plan and each slot (see core_driver); the machine checks queues, blocks and streams.
"""

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from engine_service.core.family import Family
from engine_service.core.outcome import FinishReason, RefusalCode
from engine_service.core.request import Request
from tests.unit.core.core_driver import VOCABULARY, Engine, alone, config, prompt_of, sampling

CONFIGS = st.sampled_from([1, 2, 4, 8]).flatmap(
    lambda block_size: st.fixed_dictionaries(
        {
            "block_size": st.just(block_size),
            "num_blocks": st.integers(-(-31 // block_size), 64 // block_size),
            "step_token_budget": st.integers(5, 24),
            "prefill_chunk_size": st.integers(1, 5),
            "max_num_requests": st.integers(1, 5),
            "max_waiting_requests": st.integers(2, 12),
            "max_waiting_tokens": st.integers(20, 200),
            "max_model_len": st.just(32),
            "prefix_cache": st.booleans(),
            "max_draft_tokens": st.sampled_from([0, 1, 4, 9]),
        }
    )
)
REPEATED = st.builds(lambda length, token: [token] * length, st.integers(1, 31), st.integers(1, 2))
PROMPTS = REPEATED | st.builds(prompt_of, st.integers(1, 12) | st.integers(1, 31), st.integers(0, 3))


class SchedulerMachine(RuleBasedStateMachine):
    """`depth`: plans that may be unsettled when the next is made."""

    depth = 0

    @initialize(settings_=CONFIGS, weak_hash=st.booleans(), repeats=st.booleans())
    def start(self, settings_: dict[str, Any], weak_hash: bool, repeats: bool) -> None:
        arguments: dict[str, Any] = {"hash_function": lambda data: bytes([sum(data) % 4])} if weak_hash else {}
        self.engine = Engine(config(**settings_), depth=self.depth, repeats=repeats, **arguments)
        self.most_waiting: int = settings_["max_waiting_requests"]
        self.requests: dict[int, Request] = {}
        self.prompts: dict[int, list[int]] = {}
        self.streams: dict[int, list[int]] = {}
        self.finishes: dict[int, Any] = {}
        self.hit: set[int] = set()  # aborted or made to fail: at most half, so that there is pressure

    @rule(
        prompt=PROMPTS,
        copies=st.integers(1, 4),
        are_samples=st.booleans(),
        priority=st.sampled_from([0, 0, 1, -3]),
        tenant=st.sampled_from([("", 1), ("", 1), ("a", 1), ("b", 3), ("c", 7)]),
        limits=st.fixed_dictionaries(
            {
                "max_tokens": st.integers(1, 6) | st.integers(8, 40),
                "min_tokens": st.integers(0, 6),
                "ignore_eos": st.booleans(),
                "stop_token_ids": st.just(frozenset()) | st.frozensets(st.integers(0, VOCABULARY - 1), max_size=2),
            }
        ),
        salt=st.sampled_from(["", "", "a"]),
        patience=st.none() | st.none() | st.integers(0, 40),
    )
    def submit(
        self,
        prompt: list[int],
        copies: int,
        are_samples: bool,
        priority: int,
        tenant: tuple[str, int],
        limits: dict[str, Any],
        salt: str,
        patience: int | None,
    ) -> None:
        """`copies` of a request, one by one or as the samples of one submission (refused together)."""
        limits = {**limits, "min_tokens": min(limits["min_tokens"], limits["max_tokens"])}
        family = Family() if are_samples else None
        first = len(self.requests)
        items = [
            Request(
                first + place,
                prompt,
                sampling(**limits, seed=1 + place * are_samples),
                arrival=self.engine.now,
                deadline=None if patience is None else self.engine.now + patience,
                cache_salt=salt,
                priority=priority,
                family=family,
                tenant=tenant[0],
                weight=tenant[1],
            )
            for place in range(copies)
        ]
        for together in [items] if are_samples else [[item] for item in items]:
            refusal = self.engine.scheduler.submit(*together)
            if refusal is not None:
                if refusal.code is RefusalCode.TOO_LATE:
                    assert patience is not None
                    return
                is_too_many = len(together) > self.most_waiting
                assert refusal.code is (RefusalCode.INVALID if is_too_many else RefusalCode.QUEUE_FULL)
                return
            for item in together:
                self.requests[item.request_id] = item
                self.prompts[item.request_id] = list(prompt)
                self.streams[item.request_id] = []

    @rule(count=st.integers(1, 12))
    def plan(self, count: int) -> None:
        for _ in range(count):
            if len(self.engine.in_flight) > self.depth:
                self.engine.settle()
            self.plan_once()
            self.engine.scheduler.check_invariants()

    def plan_once(self) -> None:
        self.engine.now += 1.0
        plan = self.engine.plan()
        computed = set() if plan is None else {chunk.request_id for chunk in plan.chunks}
        assert not computed & self.finishes.keys(), "a finished request is computed"
        assert not [n for n in computed if self.is_expired(n)], "an expired request is computed"
        stats = self.engine.scheduler.stats()
        if plan is None and not self.engine.in_flight:
            assert (stats.running, stats.waiting) == (0, 0), "stuck"

    def is_expired(self, number: int) -> bool:
        deadline = self.requests[number].deadline
        return deadline is not None and deadline <= self.engine.now

    @precondition(lambda self: self.engine.in_flight)
    @rule()
    def settle(self) -> None:
        self.engine.settle()
        self.engine.scheduler.observe_step(1.0, 8)

    @precondition(lambda self: len(self.requests) > 2 * len(self.hit))
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.requests)))
        self.hit.add(number)
        self.engine.scheduler.abort(number)
        self.read_news()
        assert number in self.finishes
        self.engine.scheduler.abort(number)

    @precondition(lambda self: len(self.requests) > 2 * len(self.hit))
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.requests)))
        self.hit.add(number)
        self.engine.device.failing.add(number)

    @rule()
    def read_news(self) -> None:
        news = [*self.engine.news, *self.engine.scheduler.take_news()]
        self.engine.news.clear()
        for item in news:
            assert item.request_id not in self.finishes, "news after the finish"
            self.streams[item.request_id].extend(item.token_ids)
            if item.finish is not None:
                self.finishes[item.request_id] = item.finish

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check_invariants()
            stats = self.engine.scheduler.stats()
            assert stats.used_blocks + stats.cached_blocks + stats.free_blocks == stats.total_blocks

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(200 + 400 * len(self.requests)):
            if not self.engine.scheduler.has_work:
                break
            if self.engine.in_flight and len(self.engine.in_flight) > self.depth:
                self.engine.settle()
            before = len(self.engine.plans)
            self.plan_once()
            if len(self.engine.plans) == before and self.engine.in_flight:
                self.engine.settle()
        assert not self.engine.scheduler.has_work, self.engine.scheduler.stats()
        self.read_news()
        self.check_ends()

    def check_ends(self) -> None:
        assert self.finishes.keys() == self.requests.keys()
        assert self.engine.scheduler.stats().used_blocks == 0
        assert not self.engine.device.held
        for number, item in self.requests.items():
            finish = self.finishes[number]
            tokens, reason = alone(self.prompts[number], item.sampling, 32, repeats=self.engine.device.repeats)
            if finish.reason is FinishReason.ABORT:
                assert self.streams[number] == tokens[: len(self.streams[number])]
                assert finish.error is None or self.is_expired(number)
            elif finish.reason is FinishReason.ERROR:
                assert self.streams[number] == tokens[: len(self.streams[number])]
                assert number in self.engine.device.failing
            else:
                assert (self.streams[number], finish.reason) == (tokens, reason)
            assert finish.completion_tokens == len(self.streams[number])
            assert 0 <= finish.cached_tokens < len(self.prompts[number])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_scheduler_machine(depth: int) -> None:
    """B038, B039, B046, B047, B064, B072, B073: in whatever order, with and without overlap."""
    machine = type(f"MachineDepth{depth}", (SchedulerMachine,), {"depth": depth})
    run_machine(
        machine,
        settings=settings(
            max_examples=100,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )
