"""Stop strings, stop tokens and special tokens over real sockets, a FAKE-ENGINE behind them."""

import asyncio

import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.script_s1 import EOS, S1, S1_TEXT, s1
from tests.fixtures.tokenizer_app import collect, default_model, ids_request, running

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
