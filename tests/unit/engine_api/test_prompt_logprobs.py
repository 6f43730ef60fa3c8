"""A long prompt's log probabilities on their way to the client: in turns with others, and bounded while unread."""

import asyncio
from typing import Any

import pytest

from engine_service.api.convert import add_prompt_logprobs
from engine_service.api.live_request import Submission
from engine_service.api.session_outbox import SessionOutbox
from engine_service.core.outcome import Finish, FinishReason, PositionLogprobs, RequestNews
from engine_service.core.packed_logprobs import PackedLogprobs
from engine_service.core.sampling import SamplingParams
from tokenwire.engine.v1 import engine_pb2

TOP = tuple((token, -float(token)) for token in range(20))
LONG = PackedLogprobs([PositionLogprobs(None, 0, ()), *[PositionLogprobs((7, -0.5), 3, TOP)] * 4000])
FINISH = Finish(FinishReason.LENGTH, 4001, 1, 0)


def sample(outbox: SessionOutbox, handle: int) -> Any:
    submission = Submission(
        f"r{handle}", handle, 1, SamplingParams(1, 0, prompt_logprobs=20), prompt_tokens=4001, started=0.0,
        max_unread_tokens=64, wake=lambda live: outbox.add(handle, live),
    )  # fmt: skip
    outbox.open(handle, 1)
    return submission.samples[0]


async def test_others_have_their_turn_while_a_message_is_built() -> None:
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    message = engine_pb2.RequestOutput()
    await add_prompt_logprobs(message, LONG)
    task.cancel()
    assert turns > 100
    assert len(message.prompt_logprobs) == len(LONG)
    assert not message.prompt_logprobs[0].HasField("token")
    assert [(top.token_id, top.logprob) for top in message.prompt_logprobs[4000].top] == list(TOP)


async def test_commands_wait_while_too_many_log_probabilities_are_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_service.api.session_outbox.MAX_UNREAD_PROMPT_LOGPROBS", 2 * LONG.num_logprobs)
    ended: list[int] = []
    outbox = SessionOutbox(lambda: None, ended.append)
    samples = [sample(outbox, handle) for handle in range(4)]
    for number, live in enumerate(samples):
        assert outbox.has_room.is_set() == (number < 3)
        live.add(RequestNews(live.request_id, (3,), FINISH, (), LONG))
    samples[0].cut()  # what nobody will read counts until its end is written
    while not outbox.is_empty:
        step = engine_pb2.StepOutputs()
        await outbox.move_to(step)
        assert step.outputs
    assert outbox.has_room.is_set()
    assert ended == [0, 1, 2, 3]
    assert (outbox._num_unread_prompt, outbox._unread_prompts) == (0, {})
