"""Requests that cannot meet their deadlines are refused at once, with the numbers; nobody else is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.core.speed import OPTIMISM, Speed
from tests.unit.core.core_driver import Engine, config, prompt_of, request


def busy(**changes) -> Engine:
    """Both slots are taken; steps of 16 tokens take 2 s, smaller ones 1 s; one request starts every 4 s."""
    settings = {"num_blocks": 256, "max_num_requests": 2, "prefix_cache": False, **changes}
    engine = Engine(config(**settings))
    for number in (1, 2):
        assert engine.scheduler.submit(request(number, [1], 40, arrival=0.0, ignore_eos=True)) is None
    engine.step()
    assert engine.scheduler.submit(request(3, [1] * 10, 4, arrival=0.0)) is None
    speed = engine.scheduler._speed
    for _ in range(50):
        speed.observe_step(1.0, 2)
        speed.observe_step(2.0, 16)
        speed.observe_queue(4.0, 1)
    return engine


def submit(engine: Engine, deadline: float | None, prompt: list[int] | None = None, **more) -> Refusal | None:
    return engine.scheduler.submit(request(9, prompt or [1] * 6, 4, arrival=10.0, deadline=deadline, **more))


def test_a_request_that_cannot_make_it_is_refused_with_the_numbers() -> None:
    """One request is ahead and no slot is free: two have to start, 4 s each; an estimate counts half."""
    refusal = submit(busy(), 13.9)
    assert refusal is not None
    assert refusal.code is RefusalCode.TOO_LATE
    for words in ("first token would come in 4 s", "deadline is in 3.9 s", "1 requests and 10 prompt tokens"):
        assert words in refusal.message, refusal.message
    assert refusal.retry_after_s is None


@pytest.mark.parametrize("deadline", [None, 14.1, 1e9])
def test_a_request_that_may_make_it_waits(deadline: float | None) -> None:
    assert submit(busy(), deadline) is None


def test_long_prompts_take_their_steps() -> None:
    """80 tokens are 5 steps of 16, 2 s each, and the 10 ahead: half of (5 steps of 2 s + a part of 1 s)."""
    engine = busy(max_model_len=128, max_num_requests=8)
    assert submit(engine, 15.6, [1] * 80) is None
    refusal = submit(busy(max_model_len=128, max_num_requests=8), 15.4, [1] * 80)
    assert refusal is not None
    assert "80 to be computed" in refusal.message


def test_a_cached_prompt_needs_no_time() -> None:
    engine = busy(max_model_len=128, max_num_requests=8, prefix_cache=True)
    prompt = prompt_of(80)
    assert submit(engine, 15.4, prompt) is not None
    engine.run(request(5, prompt, 1, arrival=0.0))
    engine.run(request(6, prompt, 1, arrival=0.0))
    for number in (7, 8):
        assert engine.scheduler.submit(request(number, [1], 40, arrival=0.0, ignore_eos=True)) is None
    engine.step()
    assert submit(engine, 10.9, prompt) is None


def test_an_idle_engine_and_one_that_knows_nothing_refuse_nobody() -> None:
    fresh = Engine(config())
    assert fresh.scheduler.submit(request(1, [1] * 9, deadline=0.001, arrival=0.0)) is None
    assert fresh.scheduler.submit(request(2, [1] * 9, deadline=0.001, arrival=0.0)) is None
    idle = Engine(config())
    idle.scheduler.observe_step(100.0, 16)
    assert idle.scheduler.submit(request(1, [1] * 9, deadline=1.0, arrival=0.0)) is None


def test_other_tenants_and_lower_priorities_are_ahead_only_as_far_as_they_are() -> None:
    """20 of tenant a wait: ahead of another of a's all 20, ahead of b's first none, ahead of a better priority none."""

    def engine() -> Engine:
        made = Engine(config(num_blocks=256, max_num_requests=2, prefix_cache=False))
        for number in range(20, 42):
            assert made.scheduler.submit(request(number, [1], 8, arrival=0.0, tenant="a", ignore_eos=True)) is None
        made.step()
        for _ in range(50):
            made.scheduler._speed.observe_queue(4.0, 1)
        return made

    refusal = submit(engine(), 30.0, tenant="a")
    assert refusal is not None
    assert "20 requests" in refusal.message
    assert submit(engine(), 30.0, tenant="b") is None
    assert submit(engine(), 30.0, tenant="a", priority=-1) is None


def test_an_expired_request_is_never_computed() -> None:
    engine = busy()
    assert submit(engine, 14.1) is None
    engine.now = 14.1
    engine.run()
    assert not [chunk for plan in engine.plans for chunk in plan.chunks if chunk.request_id == 9]
    assert engine.finish_of(9).error.code is RefusalCode.DEADLINE


def test_the_queue_says_when_it_will_have_room() -> None:
    """A sixteenth of 64 places and one more, at one start in 4 s."""
    engine = busy(max_waiting_requests=64)
    for number in range(100, 163):
        assert engine.scheduler.submit(request(number, [1], arrival=0.0)) is None
    refusal = submit(engine, None)
    assert refusal is not None
    assert refusal.code is RefusalCode.QUEUE_FULL
    assert refusal.retry_after_s == pytest.approx(20.0)


COSTS = st.tuples(st.floats(0.001, 0.1), st.floats(0.00001, 0.001))


@given(COSTS, st.lists(st.integers(1, 512), min_size=1, max_size=30), st.integers(0, 5000))
def test_the_estimate_is_never_later_than_the_truth(
    costs: tuple[float, float], sizes: list[int], num_tokens: int
) -> None:
    """Steps take a + b n seconds: whatever sizes were seen, the estimate is at most what the tokens really take."""
    base, each = costs
    speed = Speed(512)
    for size in sizes:
        speed.observe_step(base + each * size, size)
    full, rest = divmod(num_tokens, 512)
    truth = full * (base + each * 512) + (base + each * rest if rest else 0.0)
    assert speed.least_prompt_s(num_tokens) <= truth * (1 + 1e-9)
    assert speed.least_first_token_s(num_tokens, 0, 0) <= OPTIMISM * truth * (1 + 1e-9)


def test_a_request_that_was_half_delivered_elsewhere_is_not_refused() -> None:
    """It goes before all that is new."""
    assert submit(busy(), 10.1) is not None
    assert submit(busy(), 10.1, resumed=[7, 8]) is None
