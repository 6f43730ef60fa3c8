"""The small parts: request status, block pool, waiting queue, deadlines, stop rules, configuration, imports."""

import subprocess
import sys
from dataclasses import FrozenInstanceError
from itertools import product

import pytest

from engine_service.core.block_pool import BlockPool
from engine_service.core.deadlines import DeadlineQueue
from engine_service.core.fairness import Account, FairShares, Tenant
from engine_service.core.kv_manager import blocks_for
from engine_service.core.outcome import FinishReason
from engine_service.core.request import RequestStatus
from engine_service.core.scheduler import Scheduler
from engine_service.core.stopping import finish_reason
from engine_service.core.waiting import WaitingQueue
from tests.unit.core.core_driver import config, request

ALLOWED = {
    (RequestStatus.WAITING, RequestStatus.RUNNING),
    (RequestStatus.WAITING, RequestStatus.FINISHED),
    (RequestStatus.RUNNING, RequestStatus.PREEMPTED),
    (RequestStatus.RUNNING, RequestStatus.FINISHED),
    (RequestStatus.PREEMPTED, RequestStatus.RUNNING),
    (RequestStatus.PREEMPTED, RequestStatus.FINISHED),
}
PATHS = {
    RequestStatus.WAITING: [],
    RequestStatus.RUNNING: [RequestStatus.RUNNING],
    RequestStatus.PREEMPTED: [RequestStatus.RUNNING, RequestStatus.PREEMPTED],
    RequestStatus.FINISHED: [RequestStatus.FINISHED],
}


@pytest.mark.parametrize(("before", "after"), list(product(RequestStatus, RequestStatus)))
def test_status_changes_follow_the_table(before, after):
    item = request(1, [7])
    for status in PATHS[before]:
        item.move_to(status)
    if (before, after) in ALLOWED:
        item.move_to(after)
        assert item.status is after
    else:
        with pytest.raises(ValueError, match=f"request 1: {before.value} -> {after.value} is not allowed"):
            item.move_to(after)


def test_the_prompt_is_copied():
    prompt = [1, 2, 3]
    item = request(1, prompt)
    item.token_ids.append(4)
    assert prompt == [1, 2, 3]
    assert (item.prompt_length, item.num_completion) == (3, 1)


def test_pool_hands_out_blank_blocks_first_then_the_least_recently_used():
    pool = BlockPool(4)
    assert [pool.take() for _ in range(4)] == [(0, False), (1, False), (2, False), (3, False)]
    assert (pool.num_free, pool.num_used) == (0, 4)
    pool.release(2, True)
    pool.release(0, True)
    pool.release(3, False)
    assert (pool.num_free, pool.num_cached) == (3, 2)
    assert [pool.take() for _ in range(3)] == [(3, False), (2, True), (0, True)]
    assert pool.num_cached == 0


def test_pool_revives_a_block_from_the_middle_of_the_free_list():
    pool = BlockPool(3)
    for _ in range(3):
        pool.take()
    for block in (0, 1, 2):
        pool.release(block, True)
    pool.share(1)
    pool.share(1)
    assert (pool.references(1), pool.num_free, pool.num_cached) == (2, 2, 2)
    assert [pool.take() for _ in range(2)] == [(0, True), (2, True)]
    pool.release(1, True)
    assert (pool.references(1), pool.num_free) == (1, 0)


def test_pool_forgets_content_only_of_free_blocks_that_have_some():
    pool = BlockPool(3)
    for _ in range(2):
        pool.take()
    pool.release(0, True)
    pool.forget_content(1)  # in use
    pool.forget_content(2)  # blank
    assert (pool.num_cached, list(pool.free_blocks())) == (1, [2, 0])
    pool.forget_content(0)
    assert (pool.num_cached, list(pool.free_blocks())) == (0, [0, 2])


def test_pool_refuses_to_free_a_free_block():
    pool = BlockPool(1)
    with pytest.raises(ValueError, match="block 0 is released but not referenced"):
        pool.release(0, False)


def test_waiting_queue_has_preempted_requests_first_by_rank():
    queue = WaitingQueue()
    fresh = [request(number, [1] * number) for number in (8, 3, 9)]
    preempted = [request(number, [1] * number) for number in (6, 2, 4)]
    account = Account(Tenant("", 1))
    for item in [*fresh, *preempted]:
        item.account = account
    for item in fresh:
        queue.add(item)
    for item in preempted:
        item.move_to(RequestStatus.RUNNING)
        item.move_to(RequestStatus.PREEMPTED)
        queue.add(item)
    assert [item.request_id for item in queue.all()] == [2, 4, 6, 3, 8, 9]
    turns = queue.turns(FairShares(4))
    order = []
    while (item := turns.next()) is not None:
        order.append(item.request_id)
        turns.pass_over(item)
    turns.close()
    assert order == [2, 4, 6, 3, 8, 9]
    assert (len(queue), queue.num_tokens) == (6, 32)
    queue.remove(preempted[2])
    queue.remove(fresh[1])
    assert [item.request_id for item in queue.all()] == [2, 6, 8, 9]
    assert (len(queue), queue.num_tokens) == (4, 25)


def test_deadlines_come_in_order_and_only_of_unfinished_requests():
    queue = DeadlineQueue()
    items = {t: request(int(t), [1], deadline=t) for t in (3.0, 1.0, 2.0, 4.0)}
    queue.add(request(9, [1]))
    for item in items.values():
        queue.add(item)
    items[1.0].move_to(RequestStatus.FINISHED)
    assert queue.next() == 2.0
    assert [item.deadline for item in queue.pop_passed(3.0)] == [2.0, 3.0]
    assert queue.next() == 4.0
    assert queue.pop_passed(3.9) == []


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@pytest.mark.parametrize(
    ("completion", "settings", "expected"),
    [
        ([5], {}, None),
        ([0], {}, STOP),
        ([0], {"ignore_eos": True}, None),
        ([5], {"stop_token_ids": frozenset({5})}, STOP),
        ([5], {"stop_token_ids": frozenset({5}), "ignore_eos": True}, STOP),
        ([0], {"stop_token_ids": frozenset({0}), "ignore_eos": True}, STOP),
        ([5, 5, 5], {}, LENGTH),
        ([5, 5, 0], {}, STOP),  # EOS exactly at max_tokens
        ([5, 5, 0], {"ignore_eos": True}, LENGTH),
        ([0], {"min_tokens": 1}, None),
        ([5, 0], {"min_tokens": 1}, STOP),
        ([5, 5, 0], {"min_tokens": 3}, LENGTH),
    ],
)
def test_stop_rules(completion, settings, expected):
    item = request(1, [7, 8], max_tokens=3, **settings)
    item.token_ids += completion
    assert finish_reason(item, frozenset({0})) is expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 0}, "block_size 0 is below 1"),
        ({"num_blocks": 0}, "num_blocks 0 is below 1"),
        ({"max_num_requests": 0}, "max_num_requests 0 is below 1"),
        ({"prefill_chunk_size": 0}, "prefill_chunk_size 0 is below 1"),
        ({"max_waiting_requests": 0}, "max_waiting_requests 0 is below 1"),
        ({"max_waiting_tokens": -5}, "max_waiting_tokens -5 is below 1"),
        ({"max_model_len": 1}, "max_model_len 1 is below 2 (one prompt token, one new token)"),
        ({"prefill_chunk_size": 2_048}, "prefill_chunk_size 2,048 exceeds step_token_budget 16"),
        (
            {"max_num_requests": 17},
            "max_num_requests 17 exceeds step_token_budget 16: each running request needs one token of a step",
        ),
        (
            {"max_model_len": 4_096},
            "max_model_len 4,096 does not fit 16 KV blocks of 4 tokens: they serve up to 65 tokens",
        ),
    ],
)
def test_b071_b145_impossible_settings_are_refused_with_numbers(changes, message):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        config(**changes)
    assert str(caught.value) == message


def test_the_largest_model_len_of_a_pool_is_served():
    scheduler = Scheduler(config(max_model_len=65))
    assert scheduler.submit(request(1, [1] * 64, max_tokens=1)) is None


def test_configuration_is_frozen():
    with pytest.raises(FrozenInstanceError):
        config().block_size = 8


@pytest.mark.parametrize(("positions", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2)])
def test_blocks_for(positions, blocks):
    assert blocks_for(positions, 4) == blocks


def test_core_needs_the_standard_library_only():
    """Every module of core is imported with the others' libraries blocked, and without I/O libraries."""
    script = """
import sys, pkgutil, importlib
blocked = ["torch", "numpy", "grpc", "google", "asyncio", "transformers", "tokenizers", "pydantic"]
sys.modules.update(dict.fromkeys(blocked))
before = set(sys.modules)
import engine_service.core
for module in pkgutil.iter_modules(engine_service.core.__path__):
    importlib.import_module("engine_service.core." + module.name)
roots = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(roots - set(sys.stdlib_module_names)), sorted(roots & {"socket", "selectors", "time", "logging"}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['engine_service'] []"
