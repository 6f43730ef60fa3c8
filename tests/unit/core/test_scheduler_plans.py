"""What the scheduler plans, as tables: plans asserted literally, results scripted."""

from engine_service.core.outcome import Finish, FinishReason, RequestNews
from engine_service.core.plan import Chunk, NewRequest, Plan, Result
from engine_service.core.scheduler import Scheduler
from engine_service.core.stats import StepRecord
from tests.unit.core.core_driver import answer, config, request, sampling


def scheduler_with(*requests, **settings) -> Scheduler:
    scheduler = Scheduler(config(**settings))
    for item in requests:
        assert scheduler.submit(item) is None
    return scheduler


def step(scheduler: Scheduler, token: int = 5, **tokens: int) -> Plan:
    """Plans and settles at once, as the loop without overlap does."""
    plan = scheduler.plan(0.0)
    assert plan is not None
    scheduler.apply(answer(plan, token, **tokens))
    scheduler.check_invariants()
    return plan


def new(request_id: int, tokens: tuple[int, ...], blocks: tuple[int, ...], max_tokens: int = 8, prompt: int = 0):
    return NewRequest(request_id, tokens, prompt or len(tokens), blocks, sampling(max_tokens))


def test_one_request_from_prompt_to_end():
    scheduler = scheduler_with(request(1, [7, 8, 9], max_tokens=3))
    assert step(scheduler) == Plan(1, (Chunk(1, 0, 3, (), True),), (new(1, (7, 8, 9), (0,), 3),))
    assert scheduler.take_news() == (RequestNews(1, (5,)),)
    assert step(scheduler) == Plan(2, (Chunk(1, 3, 1, (), True),))
    assert step(scheduler) == Plan(3, (Chunk(1, 4, 1, (1,), True),))
    finish = Finish(FinishReason.LENGTH, prompt_tokens=3, completion_tokens=3, cached_tokens=0)
    assert scheduler.take_news() == (RequestNews(1, (5, 5), finish),)
    assert scheduler.has_work  # the worker still holds it
    assert step(scheduler) == Plan(4, (), (), (1,))
    assert scheduler.plan(0.0) is None
    assert not scheduler.has_work


def test_b068_long_prompt_is_chunked_and_samples_once():
    """B068: only the chunk that reaches the last token samples. All blocks are there from the start (B065)."""
    prompt = tuple(range(1, 21))
    scheduler = scheduler_with(request(1, prompt))
    assert step(scheduler) == Plan(1, (Chunk(1, 0, 8, (), False),), (new(1, prompt, (0, 1, 2, 3, 4)),))
    assert step(scheduler) == Plan(2, (Chunk(1, 8, 8, (), False),))
    assert scheduler.take_news() == ()
    assert step(scheduler) == Plan(3, (Chunk(1, 16, 4, (), True),))
    assert scheduler.take_news() == (RequestNews(1, (5,)),)
    assert step(scheduler) == Plan(4, (Chunk(1, 20, 1, (5,), True),))


def test_prefills_share_a_step_up_to_the_budget():
    scheduler = scheduler_with(*(request(i, [i] * 6) for i in (1, 2, 3)))
    plan = step(scheduler)
    assert plan.chunks == (Chunk(1, 0, 6, (), True), Chunk(2, 0, 6, (), True), Chunk(3, 0, 4, (), False))
    assert step(scheduler).chunks == (
        Chunk(1, 6, 1, (), True),
        Chunk(2, 6, 1, (), True),
        Chunk(3, 4, 2, (), True),
    )


def test_decodes_come_before_prefills_of_older_requests_and_before_new_ones():
    scheduler = scheduler_with(request(1, range(1, 25)), max_num_requests=3)
    step(scheduler)
    scheduler.submit(request(2, [1]))
    step(scheduler)
    scheduler.submit(request(3, [2, 3]))
    assert step(scheduler) == Plan(
        3,
        (Chunk(2, 1, 1, (), True), Chunk(1, 16, 8, (), True), Chunk(3, 0, 2, (), True)),
        (new(3, (2, 3), (7,)),),
    )
    assert scheduler.last_record == StepRecord(
        step=3,
        decode_tokens=1,
        prefill_tokens=10,
        running=3,
        waiting=0,
        used_blocks=8,
        admitted=(3,),
        preempted=(),
        num_decodes=1,
        free_blocks=8,
    )


def test_max_num_requests_bounds_the_running():
    scheduler = scheduler_with(*(request(i, [i]) for i in (1, 2, 3)), max_num_requests=2)
    assert [chunk.request_id for chunk in step(scheduler).chunks] == [1, 2]
    assert scheduler.stats().waiting == 1
    scheduler.abort(1)
    plan = step(scheduler)
    assert [chunk.request_id for chunk in plan.chunks] == [2, 3]
    assert plan.dropped == (1,)


def test_min_tokens_withholds_stop_tokens_chunk_by_chunk():
    scheduler = scheduler_with(request(1, [7, 8], min_tokens=2, max_tokens=5))
    allowed = [step(scheduler).chunks[0].allow_stop for _ in range(4)]
    assert allowed == [False, False, True, True]


def test_overlap_plans_the_position_of_a_token_in_flight():
    scheduler = scheduler_with(request(1, [7, 8, 9], max_tokens=3))
    first, second, third = (scheduler.plan(0.0) for _ in range(3))
    assert first.chunks == (Chunk(1, 0, 3, (), True),)
    assert second == Plan(2, (Chunk(1, 3, 1, (), True),))
    assert third == Plan(3, (Chunk(1, 4, 1, (1,), True),))
    assert scheduler.plan(0.0) is None  # the token in flight is the last one
    for plan in (first, second, third):
        scheduler.apply(answer(plan))
    assert scheduler.take_news() == (RequestNews(1, (5, 5, 5), Finish(FinishReason.LENGTH, 3, 3, 0)),)


def test_overlap_stops_at_max_model_len():
    scheduler = scheduler_with(request(1, [1] * 46, max_tokens=9), step_token_budget=46, prefill_chunk_size=46)
    plans = [scheduler.plan(0.0) for _ in range(3)]
    assert [plan and plan.chunks[0].start for plan in plans] == [0, 46, None]


def test_overlap_ignores_the_chunk_after_a_stop():
    """The extra chunk's token is never told, and the blocks go back when its plan is settled."""
    scheduler = scheduler_with(request(1, [7, 8, 9, 10]))
    first, second = scheduler.plan(0.0), scheduler.plan(0.0)
    assert second.chunks == (Chunk(1, 4, 1, (1,), True),)
    scheduler.apply(answer(first, 0))
    finish = Finish(FinishReason.STOP, 4, 1, 0, stop_token_id=0)
    assert scheduler.take_news() == (RequestNews(1, (0,), finish),)
    assert scheduler.stats().used_blocks == 2
    scheduler.check_invariants()
    scheduler.apply(answer(second))
    assert scheduler.take_news() == ()
    assert (scheduler.stats().used_blocks, scheduler.stats().generated_tokens) == (0, 1)
    assert scheduler.plan(0.0) == Plan(3, (), (), (1,))


def full_pool(**settings) -> Scheduler:
    """Two requests that fill 4 blocks of 4: each next decode needs a block."""
    first, second = request(1, [1, 2, 3, 4, 5], max_tokens=12), request(2, [6, 7, 8, 9, 10], max_tokens=12)
    defaults = {"num_blocks": 5, "max_model_len": 20, "step_token_budget": 16, "max_num_requests": 3}
    scheduler = scheduler_with(first, second, **{**defaults, **settings})
    for _ in range(4):
        step(scheduler)
    assert scheduler.stats().used_blocks == 4
    return scheduler


def test_the_lowest_ranked_request_is_preempted_and_comes_back_with_its_tokens():
    scheduler = full_pool()
    # One block is left: the older one takes it, the later one has to go.
    assert step(scheduler, 11) == Plan(5, (Chunk(1, 8, 1, (4,), True),), (), (2,))
    assert scheduler.last_record.preempted == (2,)
    assert (scheduler.stats().running, scheduler.stats().waiting, scheduler.stats().preemptions) == (1, 1, 1)
    scheduler.abort(1)
    # Its first block is still in the cache, and the one with the completion's tokens too.
    tokens = (6, 7, 8, 9, 10, 5, 5, 5, 5)
    assert step(scheduler) == Plan(
        6, (Chunk(2, 8, 1, (), True),), (NewRequest(2, tokens, 5, (2, 3, 4), sampling(12)),), (1,)
    )
    assert scheduler.take_news()[-1] == RequestNews(2, (5, 5, 5, 5, 5))


def test_a_request_in_need_preempts_itself_rather_than_an_older_one():
    scheduler = full_pool()
    plan = step(scheduler)
    assert [chunk.request_id for chunk in plan.chunks] == [1]
    assert plan.dropped == (2,)
    running = [plan.chunks[0].request_id for plan in (step(scheduler), step(scheduler))]
    assert running == [1, 1]


def test_nobody_is_admitted_in_a_step_that_is_short_of_blocks():
    """The blocks of a victim are not handed to a new request before the running ones had their turn."""
    scheduler = full_pool()
    scheduler.submit(request(3, [4], max_tokens=1))
    plan = step(scheduler)
    assert (plan.dropped, plan.new) == ((2,), ())
    assert [item.request_id for item in step(scheduler).new] == [3]


def test_overlap_preemption_waits_for_the_plans_in_flight():
    """Tokens in flight still count, and nobody else is preempted while blocks are on their way."""
    first, second = request(1, [1, 2, 3, 4, 5, 6]), request(2, [7, 8, 9])
    scheduler = scheduler_with(first, second, num_blocks=4, max_model_len=16)
    plans = [scheduler.plan(0.0) for _ in range(3)]
    assert [plan.chunks for plan in plans] == [
        (Chunk(1, 0, 6, (), True), Chunk(2, 0, 3, (), True)),
        (Chunk(1, 6, 1, (), True), Chunk(2, 3, 1, (), True)),
        (Chunk(1, 7, 1, (), True), Chunk(2, 4, 1, (3,), True)),
    ]
    # Request 1 needs a block for position 8. Request 2 is the victim, but plans in flight name its blocks.
    assert scheduler.plan(0.0) == Plan(4, (), (), (2,))
    for plan in plans:
        assert (scheduler.stats().used_blocks, scheduler.stats().preemptions) == (4, 1)
        assert scheduler.plan(0.0) is None
        scheduler.apply(answer(plan))
        scheduler.check_invariants()
    assert scheduler.take_news() == (RequestNews(1, (5, 5, 5)), RequestNews(2, (5, 5, 5)))
    assert (scheduler.stats().used_blocks, scheduler.stats().cached_blocks) == (2, 1)
    # The block without content goes first; the other one keeps the tokens of request 2.
    assert scheduler.plan(0.0) == Plan(5, (Chunk(1, 8, 1, (3,), True),))
    scheduler.apply(Result(4, ()))
    scheduler.abort(1)
    scheduler.apply(Result(5, ((1, 5),)))
    assert scheduler.plan(0.0) == Plan(
        6,
        (Chunk(2, 4, 2, (), True),),
        (NewRequest(2, (7, 8, 9, 5, 5, 5), 3, (2, 3), sampling()),),
        (1,),
    )


def prefill_tokens(plan: Plan) -> int:
    return sum(chunk.length for chunk in plan.chunks if chunk.length > 1)


def test_a_long_prompt_takes_small_chunks_beside_decodes_and_large_ones_alone():
    """Beside streams that run come prompt tokens of about twice their number, so that steps are whole tiles of 32."""
    settings = {
        "step_token_budget": 512,
        "prefill_chunk_size": 512,
        "num_blocks": 512,
        "max_num_requests": 32,
        "max_model_len": 1000,
        "prefill_per_decode": 2,
        "prefix_cache": False,
    }
    scheduler = scheduler_with(request(0, range(1, 600), max_tokens=1), **settings)
    assert [prefill_tokens(step(scheduler)) for _ in range(2)] == [512, 87]
    for number in range(1, 21):
        scheduler.submit(request(number, [number], max_tokens=100))
    step(scheduler)
    scheduler.submit(request(99, range(1, 600), max_tokens=1))
    assert [prefill_tokens(step(scheduler)) for _ in range(3)] == [44, 44, 44]
    assert scheduler.last_record is not None
    assert (scheduler.last_record.decode_tokens, scheduler.last_record.prefill_tokens) == (20, 44)
    for number in range(2, 21):
        scheduler.abort(number)
    assert [prefill_tokens(step(scheduler)) for _ in range(3)] == [31, 31, 31]
    scheduler.abort(1)
    assert prefill_tokens(step(scheduler)) == 599 - 3 * 44 - 3 * 31
