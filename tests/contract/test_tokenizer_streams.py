"""Generate and Chat over real sockets, a FAKE-ENGINE behind them: text, stops, ends and errors."""

import asyncio
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from tests.fixtures import fake_engine as fe
from tests.fixtures.tokenizer_app import collect, default_model, failure, ids_request, running
from tokenwire.common.v1 import outcome_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

# Script S1 of KNOWN_FAULTS.md: what the SUCC checkpoint answers to "Hello", and its text.
S1 = [15107, 230, 131, 13874, 44691, 23960, 57, 58, 18601, 220, 137]
S1_TEXT = " 🌶 pepper DEFGHIJ 삼"
EOS = 2


async def s1(request: fe.FakeRequest) -> None:
    await request.play(S1, eos=EOS)


def say(text: str) -> fe.Script:
    """A script that says `text`, one token per message, then EOS."""
    ids = default_model().encoder._tokenizer.encode(text, False)

    async def script(request: fe.FakeRequest) -> None:
        await request.play(ids, eos=EOS)

    return script


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


STOPS: list[tuple[str, list[str], str, str]] = [
    ("inside a token", ["DE"], " 🌶 pepper ", "DE"),
    ("across tokens", ["HIJ 삼"], " 🌶 pepper DEFG", "HIJ 삼"),
    ("first of two", ["J", "EF"], " 🌶 pepper D", "EF"),
    ("the very start", [" "], "", " "),
    ("the very end", ["삼"], " 🌶 pepper DEFGHIJ ", "삼"),
]


@pytest.mark.parametrize(("name", "stops", "text", "matched"), STOPS, ids=[row[0] for row in STOPS])
@pytest.mark.parametrize("include", [False, True])
async def test_stop_strings(name: str, stops: list[str], text: str, matched: str, include: bool) -> None:
    """B017: found inside and across tokens; text after the match never leaks."""
    async with running(default_model(), s1) as service:
        call = service.stub.Generate(ids_request([19556], stop=stops, include_stop_str_in_output=include))
        answer = await collect(call)
        assert answer.text == text + (matched if include else "")
        assert answer.completion.finish_reason == fe.STOP
        assert answer.completion.stop_string == matched
        assert answer.completion.usage.completion_tokens == len(answer.token_ids)
        assert answer.token_ids == S1[: len(answer.token_ids)]


@pytest.mark.parametrize("answers_cancel", [True, False])
async def test_stop_string_cancels_in_the_engine_within_one_message(answers_cancel: bool) -> None:
    """The engine is told at once; its last word brings the cached tokens, its silence does not hold the client up."""
    after_match = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        for token_id in S1[:5]:  # ... " DEF" completes "DE"
            await request.send([token_id])
        await request.cancelled.wait()  # without another message
        after_match.set()

    async with running(default_model(), script) as service:
        service.engine.answers_cancel = answers_cancel
        answer = await collect(service.stub.Generate(ids_request([19556], stop=["DE"]), timeout=10))
        await asyncio.wait_for(after_match.wait(), 5)
        usage = answer.completion.usage
        assert answer.completion.stop_string == "DE"
        assert (usage.prompt_tokens, usage.completion_tokens) == (1, 5)
        assert usage.cached_tokens == (7 if answers_cancel else 0)
        assert service.engine.num_cancelled == 1
        assert service.metric("stop_string_cancels_total") == 1


async def test_tokens_after_the_match_in_one_message_are_not_counted() -> None:
    async def burst(request: fe.FakeRequest) -> None:
        await request.send(S1, request.finish(fe.LENGTH, extra_tokens=len(S1), cached_tokens=3))

    async with running(default_model(), burst) as service:
        answer = await collect(service.stub.Generate(ids_request([19556], stop=["pepper"])))
        assert answer.token_ids == S1[:4]
        assert answer.completion.finish_reason == fe.STOP  # B132: a stop string wins over LENGTH
        assert answer.completion.usage.completion_tokens == 4
        assert answer.completion.usage.cached_tokens == 3
        assert service.engine.num_cancelled == 0


@pytest.mark.parametrize(("include", "text"), [(False, " 🌶"), (True, " 🌶 pepper")], ids=["hidden", "included"])
async def test_stop_token_ids(include: bool, text: str) -> None:
    """B024: the text of a stop token is hidden unless asked for; the token is counted in both."""

    async def script(request: fe.FakeRequest) -> None:
        assert list(request.message.sampling.stop_token_ids) == [13874]
        await request.play(S1[:3], eos=13874)

    async with running(default_model(), script) as service:
        request = ids_request([19556], sampling={"stop_token_ids": [13874]}, include_stop_str_in_output=include)
        answer = await collect(service.stub.Generate(request))
        assert answer.text == text
        assert answer.completion.stop_token_id == 13874
        assert answer.completion.usage.completion_tokens == 4
        assert answer.token_ids == [*S1[:3], 13874]


async def test_eos_as_a_stop_token_id_takes_no_text_away() -> None:
    """B023."""
    async with running(default_model(), s1) as service:
        answer = await collect(service.stub.Generate(ids_request([19556], sampling={"stop_token_ids": [EOS]})))
        assert answer.text == S1_TEXT
        assert answer.completion.stop_token_id == EOS


@pytest.mark.parametrize("skip", [True, False])
async def test_special_tokens_in_the_text(skip: bool) -> None:
    async def script(request: fe.FakeRequest) -> None:
        await request.play([1, 19556, EOS])

    async with running(default_model(), script) as service:
        answer = await collect(service.stub.Generate(ids_request([5], skip_special_tokens=skip)))
        assert answer.text == ("Hello" if skip else "<|im_start|>Hello<|im_end|>")


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


ENGINE_ERRORS = [
    (1, grpc.StatusCode.CANCELLED),
    (3, grpc.StatusCode.INVALID_ARGUMENT),
    (4, grpc.StatusCode.DEADLINE_EXCEEDED),
    (6, grpc.StatusCode.ALREADY_EXISTS),
    (8, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (13, grpc.StatusCode.INTERNAL),
    (14, grpc.StatusCode.UNAVAILABLE),
    (0, grpc.StatusCode.INTERNAL),
    (99, grpc.StatusCode.INTERNAL),
]


@pytest.mark.parametrize(("number", "status"), ENGINE_ERRORS)
async def test_engine_errors_pass_with_their_code_and_details(number: int, status: grpc.StatusCode) -> None:
    violation = outcome_pb2.FieldViolation(field="request.sampling.top_p", description="is 7")

    async def script(request: fe.FakeRequest) -> None:
        error = fe.error(number, "no, because of 42", field_violations=[violation])
        error.retry_delay.FromMilliseconds(1500)
        await request.send([13874])
        await request.send([], request.finish(fe.ERROR, error=error))

    async with running(default_model(), script) as service:
        error = await failure(service.stub.Generate(ids_request([5])))
        assert (error.code(), error.details()) == (status, "no, because of 42")
        status_proto = rpc_status.from_call(error)
        bad, retry = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        assert status_proto.details[0].Unpack(bad)
        assert status_proto.details[1].Unpack(retry)
        assert bad.field_violations[0].field == "options.sampling.top_p"
        assert retry.retry_delay.ToMilliseconds() == 1500
        assert service.outcomes() == {("Generate", status.name): 1}


@pytest.mark.parametrize("reason", [0, fe.ABORT, fe.ERROR])
async def test_an_end_without_a_good_reason_is_no_success(
    reason: "outcome_pb2.FinishReason.ValueType",
) -> None:
    async def script(request: fe.FakeRequest) -> None:
        await request.send([13874], request.finish(reason))

    async with running(default_model(), script) as service:
        error = await failure(service.stub.Generate(ids_request([5])))
        expected = grpc.StatusCode.CANCELLED if reason == fe.ABORT else grpc.StatusCode.INTERNAL
        assert error.code() == expected


async def test_a_session_that_ends_without_finish_is_unavailable_within_a_second() -> None:
    async def script(request: fe.FakeRequest) -> None:
        await request.send([13874])
        await fe.until_cancelled(request)

    async with running(default_model(), script) as service:
        call = service.stub.Generate(ids_request([5]))
        assert (await anext(aiter(call))).text == " pepper"
        loop = asyncio.get_running_loop()
        started = loop.time()
        await service.engine.break_sessions()
        error = await failure(call)
        assert error.code() == grpc.StatusCode.UNAVAILABLE
        assert loop.time() - started < 1.0


class _FailingDetokenizer:
    """Stands in for a detokenizer with a bug; B140."""

    def add(self, token_ids: Any) -> str:
        raise RuntimeError("/secret/path")

    def finish(self) -> str:
        return ""


@pytest.mark.parametrize("where", ["encode", "new_detokenizer", "add"])
async def test_a_tokenizer_failure_ends_that_request_alone(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """B140: the request errors, its place is freed, the others go on."""
    encoder = default_model().encoder
    release = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        if request.client_id == "other":
            await release.wait()
        await s1(request)

    def fail(*_arguments: Any, **_options: Any) -> Any:
        raise RuntimeError("/secret/path")

    async with running(default_model(), script) as service:
        other = service.stub.Generate(ids_request([19556], request_id="other"))
        await service.engine.wait_until(lambda: len(service.engine.requests) == 1)
        with monkeypatch.context() as patch:
            if where == "add":
                patch.setattr(encoder, "new_detokenizer", lambda *_: _FailingDetokenizer())
            else:
                patch.setattr(encoder, where, fail)
            error = await failure(service.stub.Generate(pb.GenerateRequest(text="Hi"), timeout=5))
        assert error.code() == grpc.StatusCode.INTERNAL
        assert "secret" not in (error.details() or "")
        if where == "add":
            await service.engine.wait_until(lambda: service.engine.num_cancelled == 1)
        release.set()
        assert (await collect(other)).text == S1_TEXT
        assert service.metric("active_requests") == 0


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
