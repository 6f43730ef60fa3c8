"""Requests that bring a part of their completion along: what is computed, reported, counted and refused."""

from engine_service.core.admission import EngineLimits, check_resumed
from engine_service.core.outcome import Finish, FinishReason, RefusalCode, RequestNews
from engine_service.core.plan import Chunk, NewRequest
from engine_service.core.request import Request
from engine_service.core.scheduler import Scheduler
from tests.unit.core.core_driver import answer, config, request, sampling

LIMITS = EngineLimits(29, 48, frozenset({0}), 4, 16)


def resumed(
    request_id: int, prompt: list[int], tokens: list[int], max_tokens: int = 8, arrival: float = 0.0
) -> Request:
    return Request(request_id, prompt, sampling(max_tokens, min_tokens=4), arrival=arrival, resumed=tokens)


def test_the_news_begin_after_the_resumed_tokens_which_count_in_everything_else():
    scheduler = Scheduler(config())
    assert scheduler.submit(resumed(1, [7, 8, 9], [1, 2, 3], max_tokens=5)) is None
    plan = scheduler.plan(0.0)
    new = NewRequest(1, (7, 8, 9, 1, 2, 3), 3, (0, 1), sampling(5, min_tokens=4))
    # Three tokens are there, the fourth must not be a stop token yet.
    assert (plan.new, plan.chunks) == ((new,), (Chunk(1, 0, 6, (), True, False),))
    scheduler.apply(answer(plan))
    assert scheduler.take_news() == (RequestNews(1, (5,)),)
    plan = scheduler.plan(0.0)
    assert plan.chunks == (Chunk(1, 6, 1, (), True, True),)
    scheduler.apply(answer(plan))
    assert scheduler.take_news() == (RequestNews(1, (5,), Finish(FinishReason.LENGTH, 3, 5, 0)),)
    stats = scheduler.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (3, 2)


def test_cached_tokens_are_those_of_the_prompt_and_told_with_the_first_token():
    scheduler = Scheduler(config(prefill_chunk_size=16))
    history = list(range(1, 10))
    for number in (1, 2):
        assert scheduler.submit(resumed(number, history[:6], history[6:], max_tokens=4)) is None
        plan = scheduler.plan(0.0)
        scheduler.apply(answer(plan))
        cached = 0 if number == 1 else 6  # of the 8 tokens found, 2 are of the completion
        finish = Finish(FinishReason.LENGTH, 6, 4, cached)
        assert scheduler.take_news() == (RequestNews(number, (5,), finish, (), (), cached),)
    assert scheduler.stats().cached_tokens == 6


def test_a_resumed_request_goes_before_new_ones_of_its_priority():
    scheduler = Scheduler(config(max_num_requests=1))
    scheduler.submit(request(1, [7], arrival=0.0))
    scheduler.submit(resumed(2, [9], [1], arrival=2.0))
    scheduler.submit(Request(3, [9], sampling(), arrival=3.0, priority=-1))
    order = []
    while (plan := scheduler.plan(0.0)) is not None:
        order += [new.request_id for new in plan.new]
        scheduler.apply(answer(plan))
    assert order == [3, 2, 1]


def test_what_leaves_no_room_is_refused_with_its_numbers():
    assert check_resumed(3, (), 1, LIMITS) is None
    assert check_resumed(3, (1, 2), 3, LIMITS) is None
    cases = [
        (check_resumed(3, (1, 2), 2, LIMITS), "2 resumed tokens leave no room for a new token within max_tokens 2"),
        (
            check_resumed(40, (1,) * 8, 100, LIMITS),
            "prompt of 40 tokens and 8 resumed ones leave no room for a new token within max_model_len 48",
        ),
        (check_resumed(3, (1, 29), 9, LIMITS), "token id 29 at position 1 is outside the vocabulary 0..28"),
    ]
    for refusal, message in cases:
        assert (refusal.code, refusal.field, refusal.message) == (RefusalCode.INVALID, "resumed_token_ids", message)
