"""Generate and Chat over real sockets, a FAKE-ENGINE behind them: prompts, text, settings and ends."""

import asyncio
from typing import Any

import grpc
import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.script_s1 import EOS, S1, S1_TEXT, s1, say
from tests.fixtures.tokenizer_app import collect, default_model, failure, ids_request, running
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb


async def test_generate_streams_whole_characters_and_ends_with_usage() -> None:
    async with running(default_model(), s1) as service:
        answer = await collect(service.stub.Generate(pb.GenerateRequest(text="Hello", request_id="r1")))
        assert answer.text == S1_TEXT
        assert answer.token_ids == [*S1, EOS]
        assert "�" not in answer.text
        last = answer.completion
        assert (last.request_id, last.finish_reason) == ("r1", fe.STOP)
        assert last.WhichOneof("stop_reason") is None
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (1, len(S1) + 1)
        request = service.engine.requests[0]
        assert request.prompt == [19556]
        assert request.client_id == "r1"


async def test_each_token_arrives_with_its_own_text_when_it_comes() -> None:
    """B019: a stop string that never begins holds nothing back; the first text waits for no second token."""
    go_on = asyncio.Event()

    async def one_then_wait(request: fe.FakeRequest) -> None:
        await request.send([13874])
        await go_on.wait()
        await request.send([23960], request.finish(fe.LENGTH, extra_tokens=1))

    async with running(default_model(), one_then_wait) as service:
        call = service.stub.Generate(ids_request([1000], stop=["ZZZZZZZZZZZZ"]))
        first = await asyncio.wait_for(anext(aiter(call)), 5)
        assert (first.text, list(first.token_ids)) == (" pepper", [13874])
        go_on.set()
        rest = await collect(call)
        assert rest.token_ids == [23960]


async def test_chat_prompt_is_the_templates() -> None:
    async with running(default_model(), s1) as service:
        request = pb.ChatRequest(messages=[pb.ChatMessage(role="user", content="Hi")])
        answer = await collect(service.stub.Chat(request))
        assert answer.text == S1_TEXT
        ids = service.engine.requests[0].prompt
        tokenized = await service.stub.Tokenize(
            pb.TokenizeRequest(conversation=pb.Conversation(messages=request.messages))
        )
        assert ids == list(tokenized.token_ids)
        assert answer.completion.usage.prompt_tokens == len(ids)
        request.add_generation_prompt = False
        await collect(service.stub.Chat(request))
        shorter = service.engine.requests[1].prompt
        assert ids[: len(shorter)] == shorter
        assert len(shorter) < len(ids)


async def test_broken_bytes_at_the_end_are_flushed() -> None:
    """The last bytes of a character that never completes are one U+FFFD, with no token left out."""

    async def script(request: fe.FakeRequest) -> None:
        await request.play(S1[:2])

    async with running(default_model(), script) as service:
        answer = await collect(service.stub.Generate(ids_request([19556])))
        assert answer.text == " �"
        assert answer.token_ids == S1[:2]
        assert answer.completion.finish_reason == fe.LENGTH


async def test_the_seed_is_chosen_here_and_reported() -> None:
    async with running(default_model(), s1) as service:
        answers = [await collect(service.stub.Generate(ids_request([5]))) for _ in range(2)]
        sent = [request.message.sampling.seed for request in service.engine.requests]
        assert [answer.completion.seed for answer in answers] == sent
        assert len(set(sent)) == 2
        chosen = await collect(service.stub.Generate(ids_request([5], sampling={"seed": -7})))
        assert chosen.completion.seed == -7


async def test_sampling_reaches_the_engine_as_given() -> None:
    """B091: zero is not unset."""
    sampling: dict[str, Any] = {
        "max_tokens": 5,
        "min_tokens": 0,
        "temperature": 0.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 0,
        "stop_token_ids": [3, 4],
        "ignore_eos": False,
    }
    async with running(default_model(), s1) as service:
        await collect(service.stub.Generate(ids_request([5], sampling=sampling, cache_salt="a")))
        await collect(service.stub.Generate(ids_request([5], sampling={"seed": 1})))
        given, unset = (request.message for request in service.engine.requests)
        assert {name: getattr(given.sampling, name) for name in sampling} == sampling
        assert given.cache_salt == "a"
        assert [field.name for field, _ in unset.sampling.ListFields()] == ["seed"]
        assert not unset.HasField("cache_salt")
        assert not unset.HasField("timeout")


async def test_the_deadline_travels_as_timeout() -> None:
    async with running(default_model(), s1) as service:
        await collect(service.stub.Generate(ids_request([5]), timeout=100))
        seconds = service.engine.requests[0].message.timeout.ToTimedelta().total_seconds()
        assert 90 < seconds < 102  # the transport rounds


async def test_a_live_request_id_is_refused_and_free_again_afterwards() -> None:
    release = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        await release.wait()
        await s1(request)

    async with running(default_model(), script) as service:
        first = service.stub.Generate(ids_request([5], request_id="same"))
        await service.engine.wait_until(lambda: len(service.engine.requests) == 1)
        error = await failure(service.stub.Generate(ids_request([5], request_id="same")))
        assert error.code() == grpc.StatusCode.ALREADY_EXISTS
        release.set()
        assert (await collect(first)).completion.request_id == "same"
        assert (await collect(service.stub.Generate(ids_request([5], request_id="same")))).text == S1_TEXT


async def test_token_only_messages_carry_no_text_and_empty_ones_are_not_sent() -> None:
    async def script(request: fe.FakeRequest) -> None:
        await request.send([])
        await request.play(S1[:4])

    async with running(default_model(), script) as service:
        answer = await collect(service.stub.Generate(ids_request([19556])))
        assert all(text or ids for text, ids in answer.deltas)
        assert answer.text == " 🌶 pepper"


async def test_tokenize_detokenize_and_models() -> None:
    async with running(default_model(), s1) as service:
        tokens = await service.stub.Tokenize(pb.TokenizeRequest(text="a\x00b"))
        assert list(tokens.token_ids) == [81, 190, 82]  # B108
        text = await service.stub.Detokenize(pb.DetokenizeRequest(token_ids=[81, 190, 82]))
        assert text.text == "a\x00b"
        assert (await service.stub.Detokenize(pb.DetokenizeRequest())).text == ""
        kept = pb.DetokenizeRequest(token_ids=[1], skip_special_tokens=False)
        assert (await service.stub.Detokenize(kept)).text == "<|im_start|>"
        assert (await service.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1]))).text == ""
        (model,) = (await service.stub.ListModels(pb.ListModelsRequest())).models
        assert (model.name, model.vocab_size, model.max_model_len) == ("smollm2-135m-instruct", 49_152, 8_192)
        assert (list(model.eos_token_ids), model.connected_engines) == ([2], 1)
        assert model.tokenizer_fingerprint == default_model().fingerprint


@pytest.mark.parametrize("text", ["He said ... and left", "日本語 नमस्ते é 👩‍👩‍👧 the   example", "   .", "\ufffd ok"])
async def test_text_survives_the_way_through_tokens(text: str) -> None:
    """B011, B012: emoji, combining marks, spaces and a genuine U+FFFD stream without loss."""
    async with running(default_model(), say(text)) as service:
        assert (await collect(service.stub.Generate(ids_request([198])))).text == text
