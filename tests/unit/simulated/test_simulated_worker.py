"""The simulated worker under the real scheduler: times, tokens, stops, log probabilities."""

import math

import pytest

from engine_service.core.outcome import RequestNews
from engine_service.core.request import Request
from engine_service.core.sampling import SamplingParams
from engine_service.core.scheduler import Scheduler, SchedulerConfig
from engine_service.simulated.step_model import StepModel
from engine_service.simulated.tokens import token_at
from engine_service.simulated.worker import SimulatedWorker

VOCAB = 97
EOS = frozenset({0, 5})
MODEL = StepModel(0.5, 0.25, 0.125, 0.0, 0.0)


class Watch:
    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def engine(**changes: int) -> tuple[Scheduler, SimulatedWorker, Watch]:
    sizes = {"num_blocks": 64, "step_token_budget": 32, "prefill_chunk_size": 8, "max_num_requests": 8} | changes
    config = SchedulerConfig(
        block_size=4,
        max_waiting_requests=64,
        max_waiting_tokens=10_000,
        max_model_len=min(128, 4 * sizes["num_blocks"]),
        eos_token_ids=EOS,
        prefix_cache=True,
        **sizes,
    )
    watch = Watch()
    worker = SimulatedWorker(MODEL, vocab_size=VOCAB, eos_token_ids=EOS, clock=lambda: watch.now, sleep=watch.sleep)
    return Scheduler(config), worker, watch


def run(scheduler: Scheduler, worker: SimulatedWorker, watch: Watch) -> list[RequestNews]:
    news: list[RequestNews] = []
    while (plan := scheduler.plan(watch.now)) is not None:
        worker.submit(plan)
        scheduler.apply(worker.result())
        news.extend(scheduler.take_news())
    scheduler.check_idle()
    return news


def tokens_of(news: list[RequestNews], request_id: int) -> list[int]:
    return [token for entry in news if entry.request_id == request_id for token in entry.token_ids]


def expected(seed: int, prompt_length: int, count: int) -> list[int]:
    return [token_at(seed, prompt_length + place, VOCAB, EOS) for place in range(count)]


def test_a_step_takes_the_model_s_time() -> None:
    scheduler, worker, watch = engine()
    scheduler.submit(Request(1, range(10, 18), SamplingParams(max_tokens=3, seed=1), arrival=0.0))
    run(scheduler, worker, watch)
    # 8 prompt tokens in one step, then two decodes.
    assert watch.now == pytest.approx((0.5 + 8 * 0.125) + 2 * (0.5 + 0.25))


def test_a_plan_in_flight_delays_the_next() -> None:
    scheduler, worker, watch = engine()
    scheduler.submit(Request(1, range(10, 12), SamplingParams(max_tokens=3, seed=1), arrival=0.0))
    first, second = scheduler.plan(0.0), None
    assert first is not None
    worker.submit(first)
    second = scheduler.plan(0.0)
    assert second is not None
    worker.submit(second)
    worker.result()
    assert watch.now == pytest.approx(0.5 + 2 * 0.125)
    worker.result()
    assert watch.now == pytest.approx(0.5 + 2 * 0.125 + 0.75)


def test_tokens_depend_on_seed_and_position_alone() -> None:
    """With chunks and preemptions (counted) as without."""
    scheduler, worker, watch = engine(num_blocks=12)
    for number in range(6):
        sampling = SamplingParams(max_tokens=20, seed=number)
        assert scheduler.submit(Request(number, range(10, 20), sampling, arrival=float(number))) is None
    news = run(scheduler, worker, watch)
    assert scheduler.stats().preemptions > 0
    for number in range(6):
        assert tokens_of(news, number) == expected(number, 10, 20)


def test_no_token_ends_a_request_early() -> None:
    stops = frozenset(range(1, 90))
    scheduler, worker, watch = engine()
    sampling = SamplingParams(max_tokens=50, seed=3, stop_token_ids=stops)
    scheduler.submit(Request(1, [7], sampling, arrival=0.0))
    found = tokens_of(run(scheduler, worker, watch), 1)
    assert len(found) == 50
    assert not (stops | EOS) & set(found)


def test_log_probabilities_are_those_of_equal_tokens() -> None:
    scheduler, worker, watch = engine()
    sampling = SamplingParams(max_tokens=2, seed=3, logprobs=2, prompt_logprobs=1)
    scheduler.submit(Request(1, range(10, 29), sampling, arrival=0.0))
    news = run(scheduler, worker, watch)
    entries = [entry for part in news for entry in part.logprobs]
    assert [entry.token for entry in entries] == [(token, -math.log(VOCAB)) for token in expected(3, 19, 2)]
    assert [len(entry.top) for entry in entries] == [2, 2]
    (prompt,) = [part.prompt_logprobs for part in news if part.prompt_logprobs]
    assert [entry.token and entry.token[0] for entry in prompt] == [None, *range(11, 29)]


def test_tokens_are_spread() -> None:
    counts = [0] * VOCAB
    for seed in range(100):
        for position in range(100):
            counts[token_at(seed, position, VOCAB, frozenset())] += 1
    assert min(counts) > 50
    assert max(counts) < 170
