"""When decodes get drafts, how much of them, and what is left when guesses were wrong: as tables."""

from typing import Any

import pytest

from engine_service.core.outcome import FinishReason
from engine_service.core.plan import Chunk, Plan, Result
from engine_service.core.request import Request
from engine_service.core.scheduler import Scheduler
from tests.unit.core.core_driver import Engine, alone, config, prompt_of, request, samples

COPIED = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]


def scheduler_with(*requests: Request, **changes: Any) -> Scheduler:
    settings = {"max_draft_tokens": 4, "prefill_chunk_size": 16, "step_token_budget": 32, "max_num_requests": 8}
    scheduler = Scheduler(config(**{**settings, **changes}))
    for item in requests:
        assert scheduler.submit(item) is None
    return scheduler


def step(scheduler: Scheduler, *tokens: int, name: int = 1) -> Plan:
    """Plans, and settles with `tokens` for the request: accepted ones and the last; 20 for all others."""
    plan = scheduler.plan(0.0)
    assert plan is not None
    sampled = [(c.request_id, tokens[-1] if c.request_id == name else 20) for c in plan.chunks if c.samples]
    accepted = ((name, tokens[:-1]),) if len(tokens) > 1 else ()
    scheduler.apply(Result(plan.step, tuple(sampled), accepted=accepted))
    scheduler.check_invariants()
    return plan


def copying(**changes: Any) -> Scheduler:
    """A request that has just generated 1 and 2, with which its prompt begins."""
    scheduler = scheduler_with(request(1, COPIED, 20), **changes)
    step(scheduler, 1)
    assert step(scheduler, 2).chunks == (Chunk(1, 10, 1, (), True),)
    return scheduler


def test_a_draft_is_what_followed_before() -> None:
    """Nothing is known of the cost of a step, so at first only a few rows are tried."""
    plan = step(copying(), 3, 4, 5, 6)
    assert plan.chunks == (Chunk(1, 11, 4, (3,), True, True, (3, 4, 5)),)


def test_what_was_right_counts_and_what_was_wrong_is_computed_again() -> None:
    scheduler = copying()
    step(scheduler, 3, 9)  # 4 and 5 were wrong
    (news,) = scheduler.take_news()
    assert news.token_ids == (1, 2, 3, 9)
    stats = scheduler.stats()
    assert (stats.drafted_tokens, stats.accepted_tokens, stats.generated_tokens) == (3, 1, 4)
    assert step(scheduler, 10).chunks == (Chunk(1, 13, 1, (), True),)  # 3 and 9 never stood together
    assert step(scheduler, 1).chunks[0].draft == (1, 2, 3)  # as after the prompt


def test_blocks_of_a_draft_come_back() -> None:
    scheduler = scheduler_with(request(1, [1, 2, 3] * 5, 30), max_draft_tokens=8, num_blocks=16)
    step(scheduler, 1)
    step(scheduler, 2)
    for _ in range(4):  # larger steps are tried one after the other
        step(scheduler, 9)
        step(scheduler, 1)
        step(scheduler, 2)
        scheduler.observe_step(0.01, 1)
    plan = scheduler.plan(0.0)
    assert plan is not None
    (chunk,) = plan.chunks
    assert len(chunk.draft) == 8
    assert scheduler.stats().used_blocks == -(-(chunk.start + 9) // 4)
    scheduler.apply(Result(plan.step, ((1, 9),)))
    scheduler.check_invariants()
    known = chunk.start + 2
    assert scheduler.stats().used_blocks == -(-known // 4)


def test_a_draft_takes_no_block_that_others_may_need() -> None:
    """The pool has as many free blocks as requests run: each may need one for its next token."""
    scheduler = copying(num_blocks=4, max_model_len=16)
    assert scheduler.stats().used_blocks == 3
    plan = step(scheduler, 3)
    assert plan.chunks == (Chunk(1, 11, 1, (), True),)


def test_a_draft_takes_no_token_of_the_budget_from_prompts() -> None:
    scheduler = copying(step_token_budget=16, prefill_chunk_size=15)
    scheduler.submit(request(2, prompt_of(30)))
    plan = step(scheduler, 3)
    assert plan.chunks == (Chunk(1, 11, 1, (), True), Chunk(2, 0, 15, (), False))


@pytest.mark.parametrize(
    ("changes", "draft"),
    [
        ({"max_tokens": 5}, (3, 4)),  # the last token is sampled and never computed
        ({"max_tokens": 3}, ()),
        ({"stop_token_ids": frozenset({5})}, (3, 4)),
        ({"stop_token_ids": frozenset({3})}, ()),
        ({"min_tokens": 4, "stop_token_ids": frozenset({5})}, (3,)),  # the row behind it may stop
    ],
)
def test_where_a_draft_ends(changes: dict[str, Any], draft: tuple[int, ...]) -> None:
    scheduler = scheduler_with(request(1, COPIED, **changes))
    step(scheduler, 1)
    step(scheduler, 2)
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert plan.chunks[0].draft == draft
    assert plan.chunks[0].allow_stop == (changes.get("min_tokens", 0) <= 2)


def test_no_draft_where_rows_cost_more_than_they_bring() -> None:
    """Steps take as long as they have rows: only a sure guess would be worth its row."""
    scheduler = scheduler_with(*(request(i, COPIED, 30, seed=i) for i in range(1, 5)))
    for rows in (1, 2, 4, 8, 16) * 8:
        assert scheduler._speculation is not None
        scheduler._speculation.observe(0.01 * rows, rows)
    step(scheduler, 1)
    step(scheduler, 2)
    assert all(not chunk.draft for chunk in step(scheduler, 3).chunks)


def test_a_step_with_others_is_not_stretched() -> None:
    """Others have nothing to gain: they wait a quarter longer at most."""
    scheduler = scheduler_with(request(1, COPIED, 30), *(request(i, [30 - i], 30) for i in range(2, 4)))
    assert scheduler._speculation is not None
    for rows, seconds in ((3, 0.010), (4, 0.012), (6, 0.014)) * 8:
        scheduler._speculation.observe(seconds, rows)
    for _ in range(2000):  # guesses are nearly always right: five rows would be better still for all together
        scheduler._speculation._common.tell(0, True)
        scheduler._speculation._common.tell(1, True)
    step(scheduler, 1)
    step(scheduler, 2)
    plan = step(scheduler, 3)
    assert plan.chunks[0].draft == (3,)


def test_a_request_with_a_draft_in_flight_waits_for_it() -> None:
    scheduler = copying()
    first = scheduler.plan(0.0)
    assert first is not None
    assert first.chunks[0].draft
    assert scheduler.plan(0.0) is None
    scheduler.apply(Result(first.step, ((1, 9),)))
    assert scheduler.plan(0.0) is not None


def test_an_abort_in_mid_draft_gives_everything_back() -> None:
    scheduler = copying()
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.abort(1)
    scheduler.apply(Result(plan.step, ((1, 6),), accepted=((1, (3, 4, 5)),)))
    (news,) = scheduler.take_news()
    assert (news.token_ids, news.finish and news.finish.reason) == ((1, 2), FinishReason.ABORT)
    scheduler.check_invariants()
    assert scheduler.stats().used_blocks == 0


def test_only_accepted_blocks_are_found_by_others() -> None:
    """The block with a wrong guess in it is indexed with what really came."""
    engine = Engine(config(max_draft_tokens=8, prefill_chunk_size=16, num_blocks=40), repeats=True)
    item = request(1, [3, 4, 3, 4, 5], 30, ignore_eos=True)
    engine.run(item)
    tokens, _ = alone([3, 4, 3, 4, 5], item.sampling, 48, repeats=True)
    stats = engine.scheduler.stats()
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    follower = request(2, [3, 4, 3, 4, 5, *tokens[:20]], 5, ignore_eos=True)
    engine.run(follower)
    engine.assert_as_alone(follower)
    assert engine.finish_of(2).cached_tokens == 24


@pytest.mark.parametrize("num_blocks", [12, 16, 40])
def test_streams_with_drafts_are_exact(num_blocks: int) -> None:
    """Also where requests are preempted all the time; the device checks each slot."""
    engine = Engine(config(num_blocks=num_blocks, max_draft_tokens=6, max_num_requests=4), repeats=True)
    items = [request(i, prompt_of(1 + 2 * i, i), 30, ignore_eos=i % 2 == 0, seed=i) for i in range(8)]
    items += samples(20, 3, prompt_of(9), 20)
    for item in items[:8]:
        assert engine.scheduler.submit(item) is None
    assert engine.scheduler.submit(*items[8:]) is None
    engine.run()
    for item in items:
        engine.assert_as_alone(item)
    stats = engine.scheduler.stats()
    assert stats.accepted_tokens > 10
    assert stats.generated_tokens == sum(len(engine.tokens_of(item.request_id)) for item in items)
    assert (stats.preemptions > 0) == (num_blocks < 40)
