"""Area 2 of the known faults over HTTP, on SUCC: stop strings, stop ids, end of text, limits of length."""

import asyncio
import json
import time
from typing import Any

import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.checkpoints import SCRIPT_S1, SCRIPT_S1_TEXT
from tests.fixtures.http_calls import CHAT, COMPLETIONS, body_of, error_of, events, http
from tests.fixtures.http_stack import HttpStack
from tests.fixtures.tokenizer_app import default_model, running
from tokenwire.common.v1 import logprobs_pb2

BOTH = pytest.mark.parametrize("stream", [False, True])
CHAIN = {"prompt": [1000], "temperature": 0, "max_tokens": 60}
# Letters, each token with its own.
LETTERS = (13874, 44691, 23960, 57, 58)


def hello(**fields: Any) -> dict[str, Any]:
    """Plays script S1."""
    return {"prompt": "Hello", "temperature": 0, "max_tokens": 40} | fields


@BOTH
@pytest.mark.parametrize(
    ("fields", "text", "stop_reason", "tokens"),
    [
        pytest.param({"stop": ["DE"]}, " 🌶 pepper ", "DE", 5, id="B017 inside a token"),
        pytest.param({"stop": "pepper D"}, " 🌶 ", "pepper D", 5, id="B017 across tokens"),
        pytest.param({"stop": ["🌶"]}, " ", "🌶", 3, id="a character of three tokens"),
        pytest.param({"stop_token_ids": [2]}, SCRIPT_S1_TEXT, None, 12, id="B023"),
        pytest.param({"stop_token_ids": [13874]}, " 🌶", 13874, 4, id="B024"),
        pytest.param(
            {"stop_token_ids": [13874], "include_stop_str_in_output": True}, " 🌶 pepper", 13874, 4, id="B024 included"
        ),
        pytest.param({"stop": ["DE"], "include_stop_str_in_output": True}, " 🌶 pepper DE", "DE", 5, id="included"),
    ],
)
def test_where_a_stop_ends_the_text(
    succ_http: HttpStack, stream: bool, fields: dict[str, Any], text: str, stop_reason: Any, tokens: int
) -> None:
    """B017, B023, B024: streamed or not, to the character; the token of a stop counts and is among the ids."""
    choice = succ_http.choice(hello(**fields), stream=stream)
    assert (choice.text, choice.finish_reason) == (text, "stop")
    assert stop_reason is None or choice.stop_reason == stop_reason
    assert choice.token_ids == SCRIPT_S1[1 : tokens + 1]
    assert succ_http.answer(COMPLETIONS, hello(**fields))["usage"]["completion_tokens"] == tokens


@BOTH
def test_two_dots_of_three_in_one_token(succ_http: HttpStack, stream: bool) -> None:
    """B017."""
    (dots,) = succ_http.answer("/tokenize", {"prompt": "..."})["tokens"]
    choice = succ_http.choice({"prompt": [dots - 1], "temperature": 0, "max_tokens": 3, "stop": ".."}, stream=stream)
    assert (choice.text, choice.finish_reason, choice.token_ids) == ("", "stop", (dots,))


async def test_text_that_begins_no_stop_string_is_not_held_back() -> None:
    """B019: the engine sends its next token only when the text of the last one has been read."""
    read = asyncio.Semaphore(0)

    async def script(request: fe.FakeRequest) -> None:
        for token_id in LETTERS:
            await request.send([token_id])
            await read.acquire()
        await request.send([], request.finish())

    texts = []
    async with running(default_model(), script) as service, http(service) as client, asyncio.timeout(20):
        body = body_of(COMPLETIONS, stream=True, stop=["Z" * 20, "QZ" * 10])
        async with client.stream("POST", COMPLETIONS, json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and (text := json.loads(line[6:])["choices"][0]["text"]):
                    texts.append(text)
                    read.release()
    assert texts == [" pepper", " DEF", "GH", "I", "J"]


STOPS_REFUSED = ["", [""], ["x", ""], ["x"] * 5000, "x" * 100_000, [1], 5, {"a": "b"}, [["x"]], True]


@BOTH
def test_stops_that_are_refused(succ_http: HttpStack, stream: bool) -> None:
    """B021: named, with the numbers of what is too many or too long; nothing is harmed."""
    for stop in STOPS_REFUSED:
        error = error_of(succ_http.post(COMPLETIONS, hello(stop=stop, stream=stream)), 400)
        assert error["param"].startswith("stop"), error
    assert "5,000" in error_of(succ_http.post(COMPLETIONS, hello(stop=["x"] * 5000)), 400)["message"]
    assert "100,000" in error_of(succ_http.post(COMPLETIONS, hello(stop="x" * 100_000)), 400)["message"]
    succ_http.assert_alive()


@BOTH
def test_no_stop_in_three_ways_and_the_most_that_is_allowed(succ_http: HttpStack, stream: bool) -> None:
    """B021: [] and null are no stop; 64 stops of 1,024 characters that begin like the text change and cost little."""
    plain = succ_http.choice(CHAIN, stream=stream)
    assert plain.token_ids == tuple(range(1001, 1061))
    many = [plain.text[:40] + "!" * 960 + f"{number:024}" for number in range(64)]
    for stop in ([], None, many):
        assert succ_http.choice(CHAIN | {"stop": stop}, stream=stream).text == plain.text

    def seconds(body: dict[str, Any]) -> float:
        begin = time.monotonic()
        succ_http.choice(body, stream=stream)
        return time.monotonic() - begin

    least = [min(seconds(CHAIN | {"stop": stop}) for _ in range(4)) for stop in (None, many)]
    assert least[1] < 2 * least[0] + 0.1


@BOTH
def test_more_min_tokens_than_max_tokens(succ_http: HttpStack, stream: bool) -> None:
    """B027."""
    error = error_of(succ_http.post(COMPLETIONS, hello(min_tokens=10, max_tokens=5, stream=stream)), 400)
    assert error["param"] == "min_tokens"
    assert "10" in error["message"]
    assert "5" in error["message"]
    assert error_of(succ_http.post(COMPLETIONS, hello(min_tokens=-1, stream=stream)), 400)["param"] == "min_tokens"
    choice = succ_http.choice(hello(min_tokens=14, max_tokens=14), stream=stream)
    assert len(choice.token_ids) == 14
    assert 2 not in choice.token_ids


@BOTH
def test_no_token_is_refused_and_one_is_one(succ_http: HttpStack, stream: bool) -> None:
    """B028: max_tokens 0 is a documented 400, with echo too; max_tokens 1 is one token, "stop" if it is the end."""
    before = succ_http.metric("generated_tokens_total")
    for echo in (False, True):
        error = error_of(succ_http.post(COMPLETIONS, hello(max_tokens=0, echo=echo, stream=stream)), 400)
        assert error["param"] == "max_tokens"
    assert succ_http.metric("generated_tokens_total") == before
    one = succ_http.choice(hello(max_tokens=1), stream=stream)
    assert (one.finish_reason, one.token_ids) == ("length", (15107,))
    end = succ_http.choice(hello(prompt=[137], max_tokens=1), stream=stream)
    assert (end.text, end.finish_reason, end.token_ids) == ("", "stop", (2,))


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    "stop", [["pepper DEFX", " peppers"], ["EFX", "J 삼!"], ["🌶!"], [" pepper DEFGHIJ 삼?"], ["GHI"]]
)
async def test_a_chunk_has_the_log_probabilities_of_the_text_it_completes(path: str, stop: list[str]) -> None:
    """B030: where text is held back so are its tokens; together the chunks have what the plain answer has."""
    ids = list(SCRIPT_S1[1:-1])

    async def script(request: fe.FakeRequest) -> None:
        for token_id in ids:
            await request.send([token_id], logprobs=[fe_position(token_id)])
            await asyncio.sleep(0)
        await request.send([], request.finish(fe.STOP))

    body = body_of(path, stop=stop, return_token_ids=True)
    body |= {"logprobs": True, "top_logprobs": 2} if path == CHAT else {"logprobs": 2}
    async with running(default_model(), script) as service, http(service) as client:
        plain = (await client.post(path, json=body)).json()
        streamed = await client.post(path, json=body | {"stream": True})
        ends = []
        for count in range(1, len(ids) + 1):
            text = (await client.post("/detokenize", json={"tokens": ids[:count]})).json()["prompt"]
            ends.append(len(text.rstrip("\ufffd")))
    *chunks, done = events(streamed.text)
    assert done == "[DONE]"
    parts = [chunk["choices"][0] for chunk in chunks]
    shown, chars = 0, 0
    for part in parts[:-1]:
        chars += len(part["delta"].get("content", "") if path == CHAT else part["text"])
        tokens = part.get("token_ids") or []
        assert tokens == ids[shown : shown + len(tokens)]
        assert len(entries(path, part)) == len(tokens)
        shown += len(tokens)
        if shown < plain["usage"]["completion_tokens"]:
            # No token whose text is not there, and no text whose token is not there.
            assert shown == 0 or ends[shown - 1] <= chars, part
            assert ends[shown] > chars or ends[shown] == ends[shown - 1], part
    assert shown == plain["usage"]["completion_tokens"]
    whole = plain["choices"][0]
    assert [entry for part in parts for entry in entries(path, part)] == entries(path, whole)
    assert chars == len(whole["message"]["content"] if path == CHAT else whole["text"])
    assert whole["stop_reason"] == (stop[0] if stop == ["GHI"] else None)


def fe_position(token_id: int) -> logprobs_pb2.PositionLogprobs:
    own = logprobs_pb2.TokenLogprob(token_id=token_id, logprob=-token_id / 8)
    return logprobs_pb2.PositionLogprobs(token=own, rank=1, top=[own])


def entries(path: str, part: Any) -> list[Any]:
    found = part["logprobs"]
    if found is None:
        return []
    return list(found["content"] if path == CHAT else zip(found["tokens"], found["token_logprobs"], strict=True))
