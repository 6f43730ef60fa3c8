"""Area 4 of the known faults, at the level of the scheduler and of the prefix index."""

import pytest

from engine_service.core.block_pool import BlockPool
from engine_service.core.kv_manager import KvManager
from engine_service.core.outcome import FinishReason
from engine_service.core.plan import Chunk
from engine_service.core.prefix_index import NullPrefixIndex, PrefixIndex, sha256_digest
from engine_service.core.scheduler import Scheduler
from tests.unit.core.core_driver import Engine, answer, config, prompt_of, request

WEAK_HASHES = {
    "constant": lambda data: b"x",
    "8 bits": lambda data: sha256_digest(data)[:1],
    "last byte": lambda data: data[-1:],
    "length": lambda data: str(len(data)).encode(),
}


def finish(engine: Engine, number: int, prompt: list[int], max_tokens: int = 1, **kwargs) -> int:
    """Runs the request to its end and returns its cached tokens."""
    item = request(number, prompt, max_tokens, ignore_eos=True, **kwargs)
    engine.run(item)
    engine.assert_as_alone(item)
    return engine.finish_of(number).cached_tokens


@pytest.mark.parametrize(("length", "cached"), [(1, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_the_last_token_of_a_cached_prompt_is_computed(length, cached):
    engine = Engine(config())
    assert finish(engine, 1, prompt_of(length)) == 0
    assert finish(engine, 2, prompt_of(length)) == cached
    first = next(plan for plan in engine.plans if plan.new and plan.new[0].request_id == 2)
    assert first.chunks[0] == Chunk(2, cached, min(8, length - cached), (), length - cached <= 8)


def test_completion_tokens_are_reused_as_a_prompt():
    """The next turn of a conversation finds the answer before it, but for the last token, never computed."""
    engine = Engine(config())
    prompt = prompt_of(6)
    finish(engine, 1, prompt, max_tokens=7)
    turn = prompt + engine.tokens_of(1)
    assert finish(engine, 2, [*turn, 3, 4]) == 12


def test_the_cache_can_be_off():
    engine = Engine(config(prefix_cache=False))
    assert [finish(engine, n, prompt_of(13)) for n in (1, 2)] == [0, 0]
    stats = engine.scheduler.stats()
    assert (stats.cached_tokens, stats.looked_up_tokens, stats.cached_blocks, stats.free_blocks) == (0, 0, 0, 16)


def test_b046_preempted_requests_meet_their_prefix_again():
    """B046: a shared prefix under a small pool; lookup and budget are one step, so nothing overruns."""
    for depth in (0, 1):
        engine = Engine(config(max_num_requests=8, num_blocks=20, max_model_len=60), depth=depth)
        prefix = prompt_of(18)
        items = [request(n, [*prefix, 1 + n], max_tokens=20, ignore_eos=True) for n in range(12)]
        engine.run(*items)
        for item in items:
            engine.assert_as_alone(item)
        assert engine.scheduler.stats().preemptions > 0
        resumed = [new for plan in engine.plans for new in plan.new if len(new.token_ids) > new.prompt_length]
        assert resumed
        starts = {(plan.step, chunk.request_id): chunk.start for plan in engine.plans for chunk in plan.chunks}
        first = [starts[plan.step, new.request_id] for plan in engine.plans for new in plan.new if new in resumed]
        assert max(first) > 16  # they found their own tokens, too


@pytest.mark.parametrize("name", WEAK_HASHES)
def test_b047_a_weak_hash_costs_hits_never_correctness(name):
    """B047: the device checks every slot, so one wrongly shared block fails the run."""
    engine = Engine(config(max_num_requests=3), hash_function=WEAK_HASHES[name])
    number = 0
    for length in (5, 9, 13, 17, 21):
        for start in (1, 2, 1, 3):
            number += 1
            finish(engine, number, prompt_of(length, start), max_tokens=3, cache_salt="ab"[number % 2])
    repeated = [4, 4, 4, 4] * 3
    for end in (5, 6):
        number += 1
        assert finish(engine, number, [*repeated, end]) in (0, 4, 8, 12)


def test_b047_equal_blocks_at_other_depths_or_salts_are_told_apart():
    """B047, B048: with a constant hash only the very same chain matches; parent and salt are compared."""
    index = PrefixIndex(2, lambda data: b"")
    first = index.publish([1, 2, 1, 2], "", [], 0, None, 7)
    assert first is not None
    assert index.match([1, 2, 1, 2], "", [], 2) == [first]
    assert index.match([1, 2], "salt", [], 1) == []
    assert index.match([1, 3], "", [], 1) == []
    assert index.publish([1, 2, 1, 2], "", [b""], 1, first, 8) is None
    assert index.blocks() == [7]


@pytest.mark.parametrize("field", ["tokens", "parent", "salt"])
def test_b047_the_key_depends_on_all_fields(field):
    index = PrefixIndex(2)
    keys: list[bytes] = []
    base = index.match([1, 2, 3, 4], "s", keys, 1) or index.publish([1, 2, 3, 4], "s", keys, 0, None, 0)
    index.publish([1, 2, 3, 4], "s", keys, 1, base, 1)
    tokens = {"tokens": [1, 2, 3, 5], "parent": [1, 1, 3, 4], "salt": [1, 2, 3, 4]}[field]
    other: list[bytes] = []
    parent = index.publish(tokens, "t" if field == "salt" else "s", other, 0, None, 2)
    index.publish(tokens, "t" if field == "salt" else "s", other, 1, parent, 3)
    assert keys[1] != other[1]
    assert (keys[0] == other[0]) is (field == "tokens")


def test_b048_salts_separate_tenants_and_reuse_happens_within_one():
    """B048: none, a short, a long and a hostile salt; '' is no salt."""
    engine = Engine(config(num_blocks=64))
    prompt = prompt_of(17)
    salts = ["a", "b", "", "x" * 10_000, "salt", "a\x00", "\ud800"]
    cached = [finish(engine, 2 * n + turn, prompt, cache_salt=salt) for n, salt in enumerate(salts) for turn in (0, 1)]
    assert cached == [0, 16] * len(salts)


def test_b050_hits_in_the_free_list_cost_free_blocks():
    """B050: 4 blocks, all hits are free, and a runner holds one: admitted only if the rest is enough."""
    pool, index = BlockPool(4), PrefixIndex(4)
    kv = KvManager(pool, index, 4)
    prompt = prompt_of(9)
    writer = request(1, prompt, max_tokens=1)
    assert kv.admit(writer, 0)
    writer.num_computed = 9
    kv.publish(writer)
    kv.release(writer)
    assert (pool.num_free, pool.num_cached) == (4, 2)
    other = request(2, prompt_of(5, 2), max_tokens=1)
    assert kv.admit(other, 0)  # takes the two blocks without content
    assert (pool.num_free, pool.num_cached) == (2, 2)
    reader = request(3, prompt, max_tokens=1)
    assert not kv.admit(reader, 0)  # two hits, both free, and one more block: three of two
    assert (pool.num_free, pool.num_cached, reader.block_table) == (2, 2, [])
    assert sorted(index.blocks()) == [0, 1]
    kv.release(other)
    assert kv.admit(reader, 0)
    assert (reader.block_table[:2], reader.num_computed, reader.cached_tokens) == ([0, 1], 8, 8)
    assert kv.evictions == 0


def test_b050_hits_on_used_blocks_cost_nothing():
    """Two blocks are free: one for the rest of the prompt, one as the reserve."""
    engine = Engine(config(num_blocks=7, max_model_len=25, step_token_budget=24, prefill_chunk_size=20))
    holder = request(1, prompt_of(17), max_tokens=3, ignore_eos=True)
    engine.scheduler.submit(holder)
    engine.step()
    sharer = request(2, prompt_of(17), max_tokens=1, ignore_eos=True)
    engine.scheduler.submit(sharer)
    engine.step()
    assert engine.plans[1].new[0].block_ids == (0, 1, 2, 3, 5)
    engine.run()
    engine.assert_as_alone(holder)
    engine.assert_as_alone(sharer)


def test_a_waiting_request_starts_as_soon_as_its_prefix_is_there():
    """It is not looked up again in every step, but when the first block it missed has been computed."""
    engine = Engine(config(num_blocks=8, max_model_len=32))
    items = [request(n, prompt_of(17), max_tokens=3, ignore_eos=True) for n in (1, 2)]
    for item in items:
        engine.scheduler.submit(item)
    for _ in range(3):
        engine.step()
    assert [[new.request_id for new in plan.new] for plan in engine.plans] == [[1], [], [2]]
    assert engine.plans[2].new[0].block_ids == (0, 1, 2, 3, 5)
    engine.run()
    assert [engine.finish_of(n).cached_tokens for n in (1, 2)] == [0, 16]


def test_b051_blocks_of_finished_requests_are_used_again_for_ever():
    """B051: 500 distinct prompts one after another, many times the pool."""
    engine = Engine(config())
    for number in range(500):
        item = request(number, prompt_of(20, number), max_tokens=2, ignore_eos=True)
        engine.run(item)
        if number % 100 == 0:
            engine.assert_as_alone(item)
        engine.news.clear()
    stats = engine.scheduler.stats()
    assert (stats.used_blocks, stats.finished_by_reason[FinishReason.LENGTH]) == (0, 500)
    assert stats.evictions > 0
    assert stats.steps == 500 * 5


def test_b055_tokens_recomputed_after_a_preemption_are_no_hits():
    """B055: disjoint prompts under a small pool; what clients and metrics see is zero."""
    engine = Engine(config(max_num_requests=4, num_blocks=12))
    items = [request(n, [2 * n + 1, 2 * n + 2, *prompt_of(8, n)], max_tokens=16, ignore_eos=True) for n in range(8)]
    engine.run(*items)
    stats = engine.scheduler.stats()
    assert stats.preemptions > 0
    assert [engine.finish_of(n).cached_tokens for n in range(8)] == [0] * 8
    assert (stats.cached_tokens, stats.looked_up_tokens) == (0, 80)


def test_b057_of_two_writers_of_a_prefix_the_first_is_indexed():
    """B057: both compute it in one step; freeing either leaves a valid index and no leak."""
    for first_to_go in (1, 2):
        engine = Engine(config())
        items = [request(n, prompt_of(7), max_tokens=20, ignore_eos=True) for n in (1, 2)]
        for item in items:
            engine.scheduler.submit(item)
        engine.step()
        assert [new.block_ids for new in engine.plans[0].new] == [(0, 1), (2, 3)]
        assert engine.scheduler._kv.index.blocks() == [0]
        engine.scheduler.abort(first_to_go)
        engine.scheduler.check_invariants()
        assert finish(engine, 3, prompt_of(7)) == 4
        assert engine.scheduler.stats().used_blocks == 0


def test_b057_eviction_of_a_parent_takes_what_follows_it():
    """A second writer's blocks hang on the first one's entry: they are found as long as that one is."""
    pool, index = BlockPool(5), PrefixIndex(2)
    kv = KvManager(pool, index, 2)
    first, second = request(1, [1, 2, 3], max_tokens=1), request(2, [1, 2, 3, 4, 5], max_tokens=1)
    assert kv.admit(first, 0)
    assert kv.admit(second, 0)
    first.num_computed, second.num_computed = 3, 5
    kv.publish(first)
    kv.publish(second)
    assert sorted(index.blocks()) == [0, 3]  # the second one's copy of [1, 2] is not indexed
    kv.release(first)
    assert pool.num_free == 2
    for _ in range(2):
        kv.grow(second)
    assert (index.blocks(), kv.evictions) == ([], 2)
    second.token_ids += [6, 7]
    second.num_computed = 7
    kv.publish(second)  # its parent is gone: nothing to hang it on
    assert index.blocks() == []
    kv.release(second)
    assert (pool.num_free, pool.num_cached) == (5, 0)


def test_tails_are_evicted_before_heads():
    engine = Engine(config(num_blocks=6, max_model_len=25))
    finish(engine, 1, prompt_of(17))
    finish(engine, 2, prompt_of(13, 2))  # takes the two blocks without content, then two tails
    assert finish(engine, 3, prompt_of(17)) == 8


def test_an_aborted_request_leaves_only_what_was_computed():
    engine = Engine(config(prefill_chunk_size=6))
    engine.scheduler.submit(request(1, prompt_of(20)))
    engine.step()
    engine.plan()  # positions 6..11 are in flight
    engine.scheduler.abort(1)
    engine.run()
    assert engine.scheduler.stats().cached_blocks == 1
    assert finish(engine, 2, prompt_of(20)) == 4


def test_blocks_of_a_plan_in_flight_are_not_in_the_index():
    scheduler = Scheduler(config())
    scheduler.submit(request(1, prompt_of(9)))
    plan = scheduler.plan(0.0)
    scheduler.submit(request(2, prompt_of(9)))
    overlapped = scheduler.plan(0.0)
    assert overlapped.new[0].request_id == 2
    assert [chunk.start for chunk in overlapped.chunks if chunk.request_id == 2] == [0]
    scheduler.apply(answer(plan))
    scheduler.submit(request(3, prompt_of(9)))
    assert [chunk.start for chunk in scheduler.plan(0.0).chunks if chunk.request_id == 3] == [8]


def test_each_block_is_hashed_once_per_request():
    """The cost of a step follows the new full blocks, never the context."""
    hashed: list[int] = []

    def counting(data: bytes) -> bytes:
        hashed.append(len(data))
        return sha256_digest(data)

    engine = Engine(config(num_blocks=64, max_model_len=200), hash_function=counting)
    engine.run(request(1, prompt_of(40), max_tokens=61, ignore_eos=True))
    assert len(hashed) == 100 // 4
    assert max(hashed) <= 4 + 32 + 4 * 8


def test_the_null_index_finds_and_keeps_nothing():
    index = NullPrefixIndex()
    assert index.publish([1, 2], "", [], 0, None, 3) is None
    assert (index.match([1, 2], "", [], 1), index.has_key(b""), index.has_block(3)) == ([], False, False)
    assert (index.remove(3), index.blocks()) == ([], [])
