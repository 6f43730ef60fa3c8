"""Area 5 of the known faults: small pools, preemption, long prompts, mixed sizes; every stream stays exact."""

import pytest

from tests.unit.core.core_driver import Engine, config, prompt_of, request

DEPTHS = pytest.mark.parametrize("depth", [0, 1])


@DEPTHS
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("block_size", [1, 8, 16, 32])
def test_b072_demand_of_four_pools(block_size, prefix_cache, depth):
    """B072: 24 requests that need four times the pool: exact lengths, and all blocks free at the end."""
    num_blocks = 256 // block_size
    engine = Engine(
        config(
            block_size=block_size, num_blocks=num_blocks, prefix_cache=prefix_cache, max_model_len=128,
            max_num_requests=16, step_token_budget=48, prefill_chunk_size=32,
        ),
        depth=depth,
    )  # fmt: skip
    items = [request(n, prompt_of(8 + n, n), max_tokens=24 + n % 5, ignore_eos=True) for n in range(24)]
    assert sum(item.length_limit for item in items) > 4 * 256
    engine.run(*items)
    for item in items:
        engine.assert_as_alone(item)
    stats = engine.scheduler.stats()
    assert stats.preemptions > 0
    assert stats.used_blocks == 0
    assert stats.cached_blocks + stats.free_blocks == num_blocks
    assert stats.cached_blocks == 0 or prefix_cache


@DEPTHS
def test_b065_preemptions_are_few(depth):
    """B065: at most a quarter of the output length for each request, and not many more steps than needed."""
    settings = {
        "block_size": 16, "max_model_len": 1024, "max_num_requests": 16, "step_token_budget": 80,
        "prefill_chunk_size": 64, "prefix_cache": False,
    }  # fmt: skip
    items = [
        [request(n, prompt_of(40 + 5 * n, n), max_tokens=100, ignore_eos=True) for n in range(16)] for _ in range(2)
    ]
    small, large = (Engine(config(num_blocks=blocks, **settings), depth=depth) for blocks in (64, 512))
    small.run(*items[0])
    large.run(*items[1])
    preempted = [small.scheduler.stats().preemptions, large.scheduler.stats().preemptions]
    assert preempted[0] > 0
    assert preempted[1] == 0
    times = [sum(new.request_id == n for plan in small.plans for new in plan.new) - 1 for n in range(16)]
    assert max(times) <= 100 // 4
    assert len(small.plans) <= 4 * len(large.plans)
    for item in items[0]:
        small.assert_as_alone(item)


def test_b065_a_request_is_admitted_with_all_its_blocks_or_waits():
    """B065: a chunk's worth of free blocks is not enough, and the one for the next token is counted."""
    engine = Engine(config(num_blocks=9, max_model_len=30))
    runner = request(1, prompt_of(14), max_tokens=16, ignore_eos=True)
    engine.scheduler.submit(runner)
    engine.step()
    engine.step()
    assert engine.scheduler.stats().used_blocks == 4
    engine.scheduler.submit(request(2, prompt_of(16, 2), max_tokens=2, ignore_eos=True))
    engine.step()
    # Five blocks are free: four for the prompt, one for the next token, none left as the reserve.
    assert (engine.scheduler.stats().running, engine.scheduler.stats().waiting) == (1, 1)
    engine.run()
    assert engine.scheduler.stats().preemptions == 0
    admitted = next(plan for plan in engine.plans if any(new.request_id == 2 for new in plan.new))
    assert 1 in admitted.dropped


def test_b067_small_requests_pass_a_big_one_that_does_not_fit():
    """B067: a big prompt waits behind a long runner; ten small ones are served meanwhile."""
    engine = Engine(config(num_blocks=12, max_model_len=49))
    runner = request(1, prompt_of(8), max_tokens=20, ignore_eos=True)
    big = request(2, prompt_of(40, 2), max_tokens=4, ignore_eos=True)
    small = [request(n, prompt_of(2, n), max_tokens=2, ignore_eos=True) for n in range(3, 13)]
    engine.run(runner, big, *small)
    admitted = [new.request_id for plan in engine.plans for new in plan.new]
    assert admitted == [1, *range(3, 13), 2]
    for item in (runner, big, *small):
        engine.assert_as_alone(item)


def test_b067_a_big_request_is_passed_a_bounded_number_of_times():
    """B067: under an endless stream of small ones the big one still starts, after 16 admissions."""
    engine = Engine(config(num_blocks=12, max_model_len=49))
    big = request(1_000, prompt_of(40, 2), max_tokens=4, ignore_eos=True, arrival=2.5)
    for number in range(200):
        engine.scheduler.submit(request(number, prompt_of(6, number), max_tokens=5, ignore_eos=True))
        if number == 2:
            engine.scheduler.submit(big)
        engine.step()
    engine.run()
    admitted = [new.request_id for plan in engine.plans for new in plan.new]
    assert admitted.index(1_000) <= 3 + 16
    engine.assert_as_alone(big)


def test_b067_many_big_requests_do_not_make_a_step_walk_the_queue():
    """Only a few that do not fit are looked at in one step; a small one far behind waits its turn."""
    engine = Engine(config(num_blocks=12, max_model_len=49, max_waiting_requests=100))
    engine.scheduler.submit(request(0, prompt_of(8), max_tokens=20, ignore_eos=True))
    for number in range(1, 41):
        engine.scheduler.submit(request(number, prompt_of(44, number), max_tokens=1, ignore_eos=True))
    engine.scheduler.submit(request(41, prompt_of(1), max_tokens=1, ignore_eos=True))
    engine.step()
    assert [new.request_id for new in engine.plans[0].new] == [0]
    engine.run()
    assert [new.request_id for plan in engine.plans for new in plan.new][:3] == [0, 1, 2]


@DEPTHS
def test_b073_waiting_requests_hold_no_blocks_and_something_always_runs(depth):
    """B073, B064: never waiting requests and no running one, once nothing is in flight."""
    engine = Engine(config(num_blocks=12, max_num_requests=3, prefill_chunk_size=3), depth=depth)
    items = [request(n, prompt_of(3 + 5 * n % 30, n), max_tokens=14, ignore_eos=True) for n in range(20)]
    for item in items:
        engine.scheduler.submit(item)
    while engine.scheduler.has_work:
        idle = not engine.in_flight
        assert engine.step() is not None or not idle or engine.scheduler.stats().waiting == 0
        for item in engine.scheduler._roster.waiting.all():
            assert item.in_flight or not item.block_table
    assert engine.scheduler.stats().preemptions > 0
    for item in items:
        engine.assert_as_alone(item)


@pytest.mark.parametrize(
    "changes",
    [
        {"prefill_chunk_size": 1},
        {"prefill_chunk_size": 1, "max_num_requests": 1, "step_token_budget": 1},
        {"block_size": 16, "num_blocks": 4, "prefill_chunk_size": 3},
        {"block_size": 48, "num_blocks": 1, "prefill_chunk_size": 5},
        {"prefill_chunk_size": 16},
        {"max_num_requests": 16, "step_token_budget": 16},
    ],
)
def test_b071_unusual_limits_work(changes):
    """B071: chunks of one token, blocks larger than chunks, one request, one block."""
    for depth in (0, 1):
        engine = Engine(config(**changes), depth=depth)
        items = [request(n, prompt_of(3 + 7 * n, n), max_tokens=6, min_tokens=n) for n in range(6)]
        engine.run(*items)
        for item in items:
            engine.assert_as_alone(item)


def test_b069_short_and_long_prompts_with_a_small_chunk():
    """B069: rows of different lengths in one step; no request gets a token that it should not."""
    engine = Engine(config(num_blocks=64, max_num_requests=16, prefill_chunk_size=3))
    lengths = [2] * 14 + [40, 44]
    items = [request(n, prompt_of(length, n), max_tokens=4, ignore_eos=True) for n, length in enumerate(lengths)]
    engine.run(*items)
    for item in items:
        engine.assert_as_alone(item)
