"""Area 9 of the known faults over HTTP: what a stream of completions or of a chat is made of, on the real engine."""

import random
from typing import Any

import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.checkpoints import SCRIPT_S1
from tests.fixtures.http_calls import CHAT, COMPLETIONS, error_of, events, http
from tests.fixtures.http_stack import HttpStack, together
from tests.fixtures.tokenizer_app import default_model, running
from tokenwire.common.v1 import logprobs_pb2

PATHS = [COMPLETIONS, CHAT]
BOTH = pytest.mark.parametrize("path", PATHS)


def ask(path: str, **fields: Any) -> dict[str, Any]:
    """Twelve drawn tokens on HIST, the same each time."""
    prompts: dict[str, Any] = {
        COMPLETIONS: {"prompt": "some words"},
        CHAT: {"messages": [{"role": "user", "content": "some words"}]},
    }
    return prompts[path] | {"max_tokens": 12, "seed": 4, "temperature": 1.0, "ignore_eos": True} | fields


def counts(usage: dict[str, Any]) -> dict[str, Any]:
    """Without how much was cached, which the first of two requests changes for the second."""
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


@BOTH
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("fields", [{}, {"max_tokens": 1}, {"stop": ["a", "e", "i", "o", "u"], "max_tokens": 60}])
def test_usage_is_one_chunk_before_the_end(hist_http: HttpStack, path: str, n: int, fields: dict[str, Any]) -> None:
    """B124: only when asked for, with no choices, equal to the plain answer's."""
    body = ask(path, n=n, **fields)
    plain = hist_http.answer(path, body)["usage"]
    for options in (None, {}, {"include_usage": False}):
        chunks = hist_http.chunks(body | {"stream_options": options}, path)
        assert all("usage" not in chunk and chunk["choices"] for chunk in chunks)
    *parts, last = hist_http.chunks(body | {"stream_options": {"include_usage": True}}, path)
    assert all(part["usage"] is None and part["choices"] for part in parts)
    assert last["choices"] == []
    assert counts(last["usage"]) == counts(plain)
    assert plain["total_tokens"] == plain["prompt_tokens"] + plain["completion_tokens"]
    for options in ({}, {"include_usage": True}):
        assert error_of(hist_http.post(path, body | {"stream_options": options}), 400)["param"] == "stream_options"


def test_usage_is_right_with_cache_hits_and_preemption(hist_http: HttpStack) -> None:
    """B124, B061: twelve requests need twice the pool; counts, tokens, log probabilities are as alone."""
    dice = random.Random(9)
    common = dice.choices(range(3, 500), k=32)
    bodies: list[dict[str, Any]] = [
        {"prompt": [*common, *dice.choices(range(3, 500), k=20 + number)], "max_tokens": 110, "seed": number}
        | {"ignore_eos": True, "stream_options": {"include_usage": True}, "logprobs": 2, "return_token_ids": True}
        for number in range(12)
    ]

    def stream(body: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        *parts, last = hist_http.chunks(body)
        choices = [part["choices"][0] for part in parts]
        ids = [token_id for choice in choices for token_id in choice.get("token_ids") or ()]
        logprobs = [choice["logprobs"] for choice in choices if choice["logprobs"]]
        tops = [top for found in logprobs for top in found["top_logprobs"]]
        assert len(ids) == len(tops) == last["usage"]["completion_tokens"]
        return [ids, tops, [own for found in logprobs for own in found["token_logprobs"]]], last["usage"]

    alone = [stream(body)[0] for body in bodies]
    before = hist_http.metric("preemptions_total")
    found = together([lambda body=body: stream(body) for body in bodies])  # type: ignore[misc]
    assert hist_http.metric("preemptions_total") > before
    for body, expected, (answer, usage) in zip(bodies, alone, found, strict=True):
        assert answer == expected
        prompt = len(body["prompt"])
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (
            prompt,
            110,
            prompt + 110,
        )
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] < prompt
    hist_http.until_idle()


@BOTH
def test_samples_are_told_apart(hist_http: HttpStack, path: str) -> None:
    """B127: the indices are 0, 1, 2; each has one finish, its own text, and in a chat one role."""
    body = ask(path, n=3)
    plain = hist_http.choices(body, path)
    chunks = hist_http.chunks(body, path)
    assert {choice["index"] for chunk in chunks for choice in chunk["choices"]} == {0, 1, 2}
    streamed = hist_http.choices(body, path, stream=True)  # asserts one finish for each
    assert [choice.text for choice in streamed] == [choice.text for choice in plain]
    assert len({choice.text for choice in plain}) == 3
    if path == CHAT:
        assert [sum("role" in part["delta"] for part in choice.chunks) for choice in streamed] == [1, 1, 1]


@pytest.mark.parametrize("n", [1, 3])
def test_the_role_comes_first_and_once(hist_http: HttpStack, n: int) -> None:
    """B128: the last delta is empty, and what names the answer stays the same."""
    chunks = hist_http.chunks(ask(CHAT, n=n), CHAT)
    for index in range(n):
        parts = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert parts[0]["delta"]["role"] == "assistant"
        assert all("role" not in part["delta"] for part in parts[1:])
        assert (parts[-1]["delta"], parts[-1]["finish_reason"]) == ({}, "length")
    for name in ("id", "created", "model", "object"):
        assert len({chunk[name] for chunk in chunks}) == 1


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 1, 5])
@pytest.mark.parametrize("max_tokens", [0, 1, 8])
@pytest.mark.parametrize("n", [1, 2])
def test_echo_logprobs_length_and_samples_together(
    hist_http: HttpStack, echo: bool, logprobs: int | None, max_tokens: int, n: int
) -> None:
    """B130, B131: streamed as not; a documented 400 or all that was asked for, never fewer."""
    body = ask(COMPLETIONS, echo=echo, logprobs=logprobs, max_tokens=max_tokens, n=n)
    if max_tokens == 0:
        for stream in (False, True):
            error = error_of(hist_http.post(COMPLETIONS, body | {"stream": stream}), 400)
            assert error["param"] in ("max_tokens", "echo")
        return
    plain = hist_http.choices(body)
    prompt = hist_http.answer("/tokenize", {"prompt": body["prompt"]})["tokens"]
    for choice in plain:
        assert choice.text.startswith("some words") or not echo
        entries = (len(prompt) if echo else 0) + max_tokens
        assert len(choice.logprobs) == (0 if logprobs is None else entries)
        assert [own is None for _, own, _ in choice.logprobs] == [echo and place == 0 for place in range(entries)][
            : len(choice.logprobs)
        ]
    if echo and logprobs is not None and n > 1:
        error_of(hist_http.post(COMPLETIONS, body | {"stream": True}), 400)
        return
    for choice, streamed in zip(plain, hist_http.choices(body, stream=True), strict=True):
        assert (streamed.text, streamed.logprobs) == (choice.text, choice.logprobs)


@pytest.mark.parametrize(
    ("fields", "reason", "tokens"),
    [
        pytest.param({"max_tokens": 12}, "stop", 12, id="the end is the last token allowed"),
        pytest.param({"max_tokens": 11}, "length", 11, id="one token before the end"),
        pytest.param({"max_tokens": 5, "stop": ["DEF"]}, "stop", 5, id="a stop string in the last token allowed"),
        pytest.param({"max_tokens": 4, "stop": ["DEF"]}, "length", 4, id="one token before the stop string"),
        pytest.param({"max_tokens": 4, "stop_token_ids": [13874]}, "stop", 4, id="a stop id is the last token allowed"),
        pytest.param({"prompt": [5] * 8180 + [1000], "max_tokens": 50}, "length", 11, id="the context is full"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_why_it_ended(succ_http: HttpStack, stream: bool, fields: dict[str, Any], reason: str, tokens: int) -> None:
    """B132: one reason for each choice, last of all."""
    choice = succ_http.choice({"prompt": "Hello", "temperature": 0, "logprobs": 0} | fields, stream=stream)
    assert (choice.finish_reason, len(choice.token_ids), len(choice.logprobs)) == (reason, tokens, tokens)


@pytest.mark.parametrize("stop", [None, ["DE"], ["DEFGHIX"], ["pepper DEFGHX", "IJ"]])
@pytest.mark.parametrize("path", PATHS)
async def test_log_probabilities_of_bursts(path: str, stop: list[str] | None) -> None:
    """B135: however many tokens come at once, those of the stream put together are those of the answer."""
    ids = SCRIPT_S1[1:-1]
    dice = random.Random(3)

    async def script(request: fe.FakeRequest) -> None:
        place = 0
        while place < len(ids):
            burst = ids[place : place + dice.randint(1, 4)]
            entries = [
                logprobs_pb2.PositionLogprobs(
                    token=logprobs_pb2.TokenLogprob(token_id=token_id, logprob=-token_id / 8), rank=1
                )
                for token_id in burst
            ]
            await request.send(burst, logprobs=entries)
            place += len(burst)
        await request.send([], request.finish())

    body: dict[str, Any] = {"stop": stop, "return_token_ids": True}
    body |= {"prompt": "x", "logprobs": 0} if path == COMPLETIONS else {"logprobs": True}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": "x"}]
    async with running(default_model(), script) as service, http(service) as client:
        plain = (await client.post(path, json=body)).json()
        for _ in range(8):
            parts = events((await client.post(path, json=body | {"stream": True})).text)[:-1]
            found = [value for part in parts for value in values(part["choices"][0]["logprobs"])]
            assert found == values(plain["choices"][0]["logprobs"])
            assert len(found) == plain["usage"]["completion_tokens"]
            assert found == [-token_id / 8 for token_id in ids[: len(found)]]


def values(logprobs: Any) -> list[float]:
    if not logprobs:
        return []
    entries = logprobs.get("content")
    return list(logprobs["token_logprobs"]) if entries is None else [entry["logprob"] for entry in entries]
