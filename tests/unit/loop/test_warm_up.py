"""The generation before readiness: which plans it makes, that it leaves nothing behind, and what it finds broken."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.plan import Failure, Plan, Result
from engine_service.loop.warm_up import NoAnswer, warm_up
from tests.fixtures.scripted_engine import ScriptedWorker


class Broken:
    """Gives no finite number."""

    def __init__(self) -> None:
        self._plan = Plan(0, ())

    def submit(self, plan: Plan) -> None:
        self._plan = plan

    def result(self) -> Result:
        return Result(0, (), tuple(Failure(chunk.request_id, "not finite") for chunk in self._plan.chunks))

    def close(self) -> None:
        return


@given(st.integers(1, 64), st.integers(1, 9), st.integers(2, 40), st.integers(1, 64))
def test_a_prefill_a_decode_and_nothing_left(block: int, blocks: int, length: int, budget: int) -> None:
    worker = ScriptedWorker()
    servable = min(length, block * blocks + 1)
    warm_up(worker, block_size=block, num_blocks=blocks, max_model_len=servable, step_token_budget=budget)
    first, *_, last = worker.plans
    (new,) = first.new
    assert set(new.block_ids) <= set(range(blocks))
    assert all(plan.num_tokens <= budget for plan in worker.plans)
    positions = [
        place
        for plan in worker.plans
        for chunk in plan.chunks
        for place in range(chunk.start, chunk.start + chunk.length)
    ]
    assert positions == list(range(len(positions)))
    assert len(positions) <= len(new.block_ids) * block
    assert len(positions) < servable
    assert (last.chunks, last.dropped) == ((), (new.request_id,))
    if servable > 2 and block * blocks > 1:
        assert [plan.num_tokens for plan in worker.plans][-2:] == [1, 0]


def test_a_model_that_gives_no_numbers_does_not_get_ready() -> None:
    with pytest.raises(NoAnswer, match="the model does not answer: not finite"):
        warm_up(Broken(), block_size=16, num_blocks=4, max_model_len=64, step_token_budget=64)
