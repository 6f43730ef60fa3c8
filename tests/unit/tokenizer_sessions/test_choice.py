"""The choice of a replica, as tables; what the router knows when it chooses."""

from typing import Any

import pytest

from tests.unit.tokenizer_sessions.test_connection import Sink, connection
from tokenizer_service.engines.block_digests import block_digests
from tokenizer_service.engines.connection import EngineConnection
from tokenizer_service.engines.messages import ModelInfo, SamplingOptions, TokenSubmission, Usage
from tokenizer_service.engines.prefix_map import PrefixMap
from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.engines.replica_load import EngineLoad, ReplicaLoad
from tokenizer_service.routing.choice import Candidate, Draw, Policy, Reason, Weights, choose
from tokenizer_service.routing.expected import ExpectedBlocks
from tokenizer_service.routing.router import Router
from tokenwire.engine.v1 import engine_pb2

PROMPT = 1000
ONLY, PREFIX, LOAD, HOT = Reason.ONLY, Reason.PREFIX, Reason.LOAD, Reason.HOT_SPOT


def replica(cached: int = 0, queued: int = 0, streams: int = 0, **more: Any) -> Candidate:
    return Candidate(cached, queued, streams, **({"outstanding_tokens": queued} | more))


def draw(turn: int = 0, *numbers: int) -> Draw:
    """`numbers` are what chance gives, one after the other."""
    left = list(numbers)
    return Draw(lambda below: left.pop(0) % below if left else 0, turn)


@pytest.mark.parametrize(
    ("candidates", "turn", "expected"),
    [
        ([replica()], 0, (0, ONLY)),
        ([replica(), replica(cached=960)], 0, (1, PREFIX)),
        # The longest prefix wins while the rest is equal.
        ([replica(cached=512), replica(cached=960), replica(cached=16)], 0, (1, PREFIX)),
        # What waits there costs half of what would be computed again.
        ([replica(), replica(cached=960, queued=1919)], 0, (1, PREFIX)),
        ([replica(), replica(cached=960, queued=1921)], 0, (0, LOAD)),
        ([replica(cached=512), replica(cached=960, queued=900)], 0, (0, LOAD)),
        # A running sample costs 32 tokens.
        ([replica(), replica(cached=64, streams=3)], 0, (1, PREFIX)),
        ([replica(), replica(cached=64, streams=5)], 0, (0, LOAD)),
        # Much more loaded than the least: the bonus is lost, although the prompt alone would cost more.
        ([replica(), replica(cached=9000, queued=2048)], 0, (1, PREFIX)),
        ([replica(), replica(cached=9000, queued=2049)], 0, (0, HOT)),
        ([replica(queued=1000), replica(cached=9000, queued=4048)], 0, (1, PREFIX)),
        ([replica(queued=1000), replica(cached=9000, queued=4049)], 0, (0, HOT)),
        # Another holder takes over when the first one is hot.
        ([replica(), replica(cached=9000, queued=5000), replica(cached=8000, queued=100)], 0, (2, HOT)),
        # KV that running requests hold cannot be had: what is missing counts four times.
        ([replica(room_tokens=2000), replica(cached=480, room_tokens=0)], 0, (0, LOAD)),
        ([replica(room_tokens=2000), replica(cached=480, room_tokens=520)], 0, (1, PREFIX)),
        # Equal holders take turns.
        ([replica(cached=480), replica(cached=480), replica()], 0, (0, PREFIX)),
        ([replica(cached=480), replica(cached=480), replica()], 1, (1, PREFIX)),
        ([replica(cached=480), replica(cached=480), replica()], 2, (0, PREFIX)),
    ],
)
def test_prefix_against_load(candidates: list[Candidate], turn: int, expected: tuple[int, Reason]) -> None:
    prompt = 10_000 if max(each.cached_tokens for each in candidates) > PROMPT else PROMPT
    assert choose(Policy.PREFIX, candidates, prompt, draw(turn)) == expected


@pytest.mark.parametrize(
    ("numbers", "loads", "turn", "expected"),
    [
        ((0, 0), (5, 1, 0), 0, 1),  # of the first and the second
        ((2, 0), (5, 1, 9), 0, 0),  # of the third and the first
        ((0, 1), (5, 1, 0), 0, 2),
        ((1, 0), (0, 7, 7), 0, 1),  # a tie, in turns
        ((1, 0), (0, 7, 7), 1, 2),
    ],
)
@pytest.mark.parametrize("policy", [Policy.PREFIX, Policy.POWER_OF_TWO])
def test_without_cached_prefixes_the_better_of_two_random_ones(
    policy: Policy, numbers: tuple[int, ...], loads: tuple[int, ...], turn: int, expected: int
) -> None:
    candidates = [replica(queued=queued) for queued in loads]
    assert choose(policy, candidates, PROMPT, draw(turn, *numbers)) == (expected, LOAD)


def test_the_other_policies_look_at_nothing_else() -> None:
    candidates = [replica(cached=960, queued=3), replica(queued=1, streams=99), replica(queued=2)]
    assert choose(Policy.LEAST_WORK, candidates, PROMPT, draw()) == (1, LOAD)
    turns = [choose(Policy.ROUND_ROBIN, candidates, PROMPT, draw(turn)) for turn in range(4)]
    assert turns == [(0, Reason.TURN), (1, Reason.TURN), (2, Reason.TURN), (0, Reason.TURN)]


def test_weights_are_honoured() -> None:
    pair = [replica(), replica(cached=960, queued=900)]
    assert choose(Policy.PREFIX, pair, PROMPT, draw(), Weights(queued=2.2)) == (0, LOAD)
    assert choose(Policy.PREFIX, pair, PROMPT, draw(), Weights(hot_slack_tokens=800)) == (0, HOT)


def test_load_counts_our_own_to_the_moment_and_others_by_what_was_told() -> None:
    load = ReplicaLoad()
    load.sent(1, 100, 2)
    load.sent(2, 50, 1)
    assert (load.all_queued_tokens, load.all_streams) == (150, 3)
    load.note(EngineLoad(running=4, waiting=1, queued_tokens=450, free_blocks=3, evictable_blocks=4))
    assert (load.all_queued_tokens, load.all_streams) == (450, 5)
    load.began(1)
    assert (load.all_queued_tokens, load.all_streams) == (350, 5)
    load.sample_ended(Usage(10, 1, 4))
    assert (load.prompt_tokens, load.cached_tokens) == (10, 4)
    load.forget(1, 1)
    load.forget(2, 1)
    assert (load.all_queued_tokens, load.all_streams) == (300, 2)
    load.note(EngineLoad(running=0, waiting=0, queued_tokens=0, free_blocks=7, evictable_blocks=0))
    assert (load.all_queued_tokens, load.all_streams) == (0, 0)


def test_expected_prompts_are_forgotten_in_time_and_bounded() -> None:
    expected = ExpectedBlocks(lifetime_s=10.0, max_blocks=4)
    expected.add(1, [b"a", b"b"], now=0.0)
    expected.add(2, [b"b", b"c"], now=5.0)
    expected.add(1, [b"a"], now=6.0)  # known already: its time does not start again
    assert expected.current(9.9) == {b"a": 1, b"b": 3, b"c": 2}
    assert expected.current(10.0) == {b"b": 2, b"c": 2}
    expected.add(1, [b"x", b"y", b"z"], now=11.0)
    assert expected.current(11.0) == {b"x": 1, b"y": 1, b"z": 1}
    assert expected.current(99.0) == {}


BLOCK = 4
MODEL = ModelInfo("m", 100, 5000, frozenset({2}), "abc", "e1", block_size=BLOCK)


def holders(count: int) -> tuple[Router, list[EngineConnection], list[Reason]]:
    reasons: list[Reason] = []
    prefixes = PrefixMap(1000)
    made = [connection(MODEL) for _ in range(count)]
    for place, each in enumerate(made):
        each.address = f"engine-{place}:1"
        each.blocks = prefixes.new_holder()
    return Router(made, prefixes=prefixes, clock=lambda: 0.0, observe=reasons.append), made, reasons


def ask(router: Router, tokens: list[int], salt: str | None = None, **more: Any) -> None:
    submission = TokenSubmission("r", tokens, SamplingOptions(max_tokens=5), cache_salt=salt)
    assert not isinstance(router.submit(submission, Sink(), **more), Refusal)


def test_the_holder_of_the_prefix_gets_the_request_and_only_with_the_same_salt() -> None:
    router, (first, second, third), reasons = holders(3)
    shared = list(range(80))
    assert third.blocks is not None
    third.blocks.store(block_digests([*shared, 0], BLOCK, "tenant"))
    for place in range(3):
        ask(router, [*shared, 90 + place], salt="tenant")
    assert ([c.num_live for c in (first, second, third)], reasons) == ([0, 0, 3], [PREFIX] * 3)
    assert third.load.queued_tokens == 3
    ask(router, [*shared, 99])
    assert (third.num_live, reasons[-1]) == (3, LOAD)
    ask(router, [*shared, 98], salt="tenant", avoid=frozenset({third.address}))
    assert third.num_live == 3


def test_a_burst_with_one_prefix_goes_together_until_that_costs_more_than_to_compute_it_again() -> None:
    """The first request's blocks count from the moment at which it is sent."""
    router, made, reasons = holders(2)
    shared = list(range(240))
    for place in range(7):
        ask(router, [*shared, place, 1, 2])
    # 243 tokens wait for the first, then 3 and a sample's 32 each; to compute all again costs twice 243.
    assert (sorted(each.num_live for each in made), reasons) == ([0, 7], [LOAD] + [PREFIX] * 6)
    assert sum(each.load.queued_tokens for each in made) == 243 + 6 * 3
    ask(router, [*shared, 99, 1, 2])
    assert (sorted(each.num_live for each in made), reasons[-1]) == ([1, 7], LOAD)


def test_what_has_begun_waits_no_longer() -> None:
    router, made, _ = holders(2)
    ask(router, list(range(40)))
    (busy,) = [each for each in made if each.num_live]
    assert (busy.load.queued_tokens, busy.load.streams) == (40, 1)
    busy.requests.dispatch(engine_pb2.StepOutputs(outputs=[engine_pb2.RequestOutput(handle=1, token_ids=[4])]))
    assert (busy.load.queued_tokens, busy.load.streams) == (0, 1)
    assert busy._disconnect()
    assert (busy.load.queued_tokens, busy.load.streams, busy.load.told) == (0, 0, None)
