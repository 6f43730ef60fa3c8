"""Several samples and log probabilities of the tokenizer service, over real sockets beside a FAKE-ENGINE."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import grpc
import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.tokenizer_app import Service, default_model, eventually, failure, ids_request, running
from tokenwire.common.v1 import outcome_pb2
from tokenwire.common.v1.logprobs_pb2 import PositionLogprobs
from tokenwire.engine.v1 import engine_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client import AsyncClient, Completion, Sampling
from tokenwire_client import FinishReason as Reason

PEPPER = [15107, 230, 131, 13874]  # " 🌶 pepper": the character comes with its third token
LETTERS = [44691, 23960, 57]  # " DEFGHI" in three tokens


def ended(count: int, reason: "outcome_pb2.FinishReason.ValueType" = fe.LENGTH, **fields: Any) -> engine_pb2.Finish:
    usage = outcome_pb2.Usage(prompt_tokens=1, completion_tokens=count, cached_tokens=0)
    return engine_pb2.Finish(reason=reason, usage=usage, **fields)


def position(token_id: int, alternatives: Sequence[int] = ()) -> PositionLogprobs:
    top = [{"token_id": other, "logprob": -0.25 * place} for place, other in enumerate(alternatives)]
    return PositionLogprobs(token={"token_id": token_id, "logprob": -token_id / 8}, rank=3, top=top)


async def samples(service: Service, request: pb.GenerateRequest) -> dict[int, list[pb.GenerateResponse]]:
    """A stream by sample; asserts that each ends once and says nothing afterwards."""
    messages: dict[int, list[pb.GenerateResponse]] = defaultdict(list)
    async for message in service.stub.Generate(request):
        assert not messages[message.index] or not messages[message.index][-1].HasField("completion")
        messages[message.index].append(message)
    assert all(each[-1].HasField("completion") for each in messages.values())
    return messages


def text_of(messages: Sequence[pb.GenerateResponse]) -> str:
    return "".join(message.text for message in messages)


async def test_a_stop_string_ends_one_sample_and_the_engine_hears_which() -> None:
    cancelled = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        await request.send([PEPPER[0]], index=0)
        await request.send([*PEPPER, 1000], index=1)  # its stop string is in it
        while 1 not in request.cancelled_samples:
            await request.send([PEPPER[1]] if request.sent == 6 else [], index=0)
            await asyncio.sleep(0)
        cancelled.set()
        await request.send([1000], index=1)  # what the engine had made meanwhile: nobody sees it
        await request.send(PEPPER[2:3], index=0)
        await request.send([], ended(3), index=0)
        await request.send(LETTERS, ended(3), index=2)

    async with running(default_model(), script) as service:
        request = ids_request([5], stop=["pepper"], sampling={"n": 3, "seed": 2**63 - 1})
        messages = await samples(service, request)
        assert cancelled.is_set()
        assert {index: text_of(each) for index, each in messages.items()} == {0: " 🌶", 1: " 🌶 ", 2: " DEFGHI"}
        ends = [messages[index][-1].completion for index in range(3)]
        assert [end.seed for end in ends] == [2**63 - 1, -(2**63), -(2**63) + 1]
        assert [end.stop_string for end in ends] == ["", "pepper", ""]
        assert [end.usage.completion_tokens for end in ends] == [3, 4, 3]
        assert ends[1].usage.cached_tokens == 7  # of the engine's last word
        assert service.engine.requests[0].cancelled_samples == {1}
        assert service.engine.num_cancelled == 0
        assert service.outcomes() == {("Generate", "OK"): 1}
        assert service.metric("generated_tokens_total") == 10
        assert service.metric("prompt_tokens_total") == 1


async def test_leaving_ends_all_samples_at_once() -> None:
    async with running(default_model(), fe.chain_until_cancelled) as service:
        call = service.stub.Generate(ids_request([5], sampling={"n": 4}))
        await anext(aiter(call))
        call.cancel()
        await service.engine.wait_until(lambda: service.engine.num_cancelled == 1)
        assert service.engine.requests[0].cancelled_samples == set()
        await eventually(lambda: service.metric("active_requests") == 0)


async def test_a_slow_reader_of_samples_is_bounded_by_all_of_them() -> None:
    async def script(request: fe.FakeRequest) -> None:
        while not request.cancelled.is_set():
            for index in range(4):
                await request.send([13874] * 200, index=index)
            await asyncio.sleep(0)

    async with running(default_model(), script, max_unread_tokens=2_000) as service:
        slow = service.stub.Generate(ids_request([5], sampling={"n": 4}))  # nobody reads it
        await service.engine.wait_until(lambda: service.engine.num_cancelled == 1)
        error = await failure(slow)
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "2,200 tokens" in (error.details() or "")


async def test_the_engine_s_refusal_of_one_sample_is_the_request_s() -> None:
    async def script(request: fe.FakeRequest) -> None:
        await request.send([1000], ended(1), index=1)
        refusal = fe.error(8, "the queue is full")
        await request.send([], ended(0, fe.ERROR, error=refusal), index=0)

    async with running(default_model(), script) as service:
        error = await failure(service.stub.Generate(ids_request([5], sampling={"n": 2})))
        assert (error.code(), error.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full")


@pytest.mark.parametrize("stops", [[], ["pepper D", "zzz"], ["EF"]])
async def test_log_probabilities_are_those_of_the_tokens_beside_them(stops: list[str]) -> None:
    """B030: also where text is held back, and none of a token after the stop."""
    ids = [*PEPPER, *LETTERS]

    async def script(request: fe.FakeRequest) -> None:
        for token_id in ids:
            await request.send([token_id], logprobs=[position(token_id, [230, 2])])
            await asyncio.sleep(0)
        await request.send([], request.finish())

    async with running(default_model(), script) as service:
        request = ids_request([5], stop=stops, sampling={"logprobs": 2})
        messages = (await samples(service, request))[0]
        shown = [token_id for message in messages for token_id in message.token_ids]
        assert shown == (ids[:5] if stops else ids)
        for message in messages:
            assert [each.token.token_id for each in message.logprobs] == list(message.token_ids)
        positions = [each for message in messages for each in message.logprobs]
        assert positions[0].rank == 3
        assert [each.token.logprob for each in positions] == [-token_id / 8 for token_id in shown]
        assert [(top.token_id, top.token) for top in positions[0].top] == [(230, b"\x8c"), (2, b"<|im_end|>")]
        joined = b"".join(each.token.token for each in positions).decode()
        assert joined == (" 🌶 pepper DEF" if stops else " 🌶 pepper DEFGHI")
        assert joined.startswith(text_of(messages))


async def test_a_long_prompt_s_log_probabilities_arrive_whole_and_first() -> None:
    prompt = [1000 + place for place in range(700)]

    async def script(request: fe.FakeRequest) -> None:
        first = PositionLogprobs()
        known = [first, *[position(token_id, range(20)) for token_id in request.prompt[1:]]]
        await request.send(PEPPER, prompt_logprobs=known)
        await request.send([], request.finish())

    async with running(default_model(), script) as service:
        async with AsyncClient(f"127.0.0.1:{service.app.port}") as client:
            stream = client.generate(prompt, Sampling(prompt_logprobs=20))
            deltas = [delta async for delta in stream]
            parts = [delta for delta in deltas if delta.prompt_logprobs]
            assert deltas[: len(parts)] == parts
            assert max(len(delta.prompt_logprobs) for delta in parts) < 100
            completion = await stream.result()
        known = completion.prompt_logprobs
        assert [None if each.token is None else each.token.token_id for each in known] == [None, *prompt[1:]]
        assert all(len(each.top) == 20 for each in known[1:])
        assert (completion.text, completion.logprobs) == (" 🌶 pepper", ())


async def test_the_client_library_gets_every_sample() -> None:
    async def script(request: fe.FakeRequest) -> None:
        assert request.message.sampling.n == 3
        assert request.message.priority == -2
        for token_id in PEPPER:
            for index in range(3):
                await request.send([token_id + index], logprobs=[position(token_id + index)], index=index)
        for index in (2, 0, 1):
            await request.send([], ended(4), index=index)

    async with running(default_model(), script) as service:
        async with AsyncClient(f"127.0.0.1:{service.app.port}") as client:
            results = await client.generate([5], Sampling(n=3, logprobs=0, seed=4), priority=-2).results()
            texts = [await client.detokenize([token_id + index for token_id in PEPPER]) for index in range(3)]
        assert [completion.text for completion in results] == texts
        assert [(completion.index, completion.seed) for completion in results] == [(0, 4), (1, 5), (2, 6)]
        assert all(completion.finish_reason is Reason.LENGTH for completion in results)
        for completion in results:
            assert _ids_of_logprobs(completion) == list(completion.token_ids)


def _ids_of_logprobs(completion: Completion) -> list[int | None]:
    return [None if each.token is None else each.token.token_id for each in completion.logprobs]


async def test_the_defaults_of_the_model_are_listed() -> None:
    async with running(default_model(), fe.until_cancelled) as service:
        service.engine.model.default_sampling.temperature = 0.25
        await service.engine.break_sessions()
        await service.engine.wait_until(lambda: len(service.engine.sessions) == 1)
        await service.wait_health(True)
        [model] = (await service.stub.ListModels(pb.ListModelsRequest())).models
        assert model.default_sampling.temperature == 0.25
        assert not model.default_sampling.HasField("top_k")
