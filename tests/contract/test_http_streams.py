"""Streams over HTTP: the same text as without, one good end or none, and nobody computes for a client that left."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.http_calls import CHAT, COMPLETIONS, RESPONSES, body_of, error_of, events, http, text_of
from tests.fixtures.tokenizer_app import Service, default_model, eventually, running

PATHS = [CHAT, COMPLETIONS, RESPONSES]
SCRIPT = (15107, 230, 131, 13874, 44691, 23960, 57, 58, 18601, 220, 137)
TEXT = " 🌶 pepper DEFGHIJ 삼"


async def play_script(request: fe.FakeRequest) -> None:
    await request.play(SCRIPT, eos=2)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("stop", "text"), [(None, TEXT), ("DE", " 🌶 pepper "), ("FGX", TEXT)])
async def test_a_stream_has_the_text_of_the_answer(path: str, stop: str | None, text: str) -> None:
    async with running(default_model(), play_script) as service, http(service) as client:
        for stream in (False, True):
            answer = await client.post(path, json=body_of(path, stop=stop, stream=stream))
            assert text_of(path, answer) == text


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("options", [None, {"include_usage": False}, {"include_usage": True}])
@pytest.mark.parametrize("stop", [None, "DE"])
async def test_usage_is_in_one_chunk_of_its_own(path: str, options: dict[str, bool] | None, stop: str | None) -> None:
    """B124."""
    async with running(default_model(), play_script) as service, http(service) as client:
        plain = (await client.post(path, json=body_of(path, stop=stop))).json()["usage"]
        body = body_of(path, stop=stop, stream=True, stream_options=options)
        *chunks, done = events((await client.post(path, json=body)).text)
        assert done == "[DONE]"
        if not (options or {}).get("include_usage"):
            assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)
            return
        *parts, last = chunks
        assert all(part["usage"] is None and part["choices"] for part in parts)
        assert last["choices"] == []
        assert {**last["usage"], "prompt_tokens_details": None} == {**plain, "prompt_tokens_details": None}


async def test_finish_reasons_and_stop_reasons() -> None:
    """B024, B132."""
    ends = [fe.LENGTH, fe.STOP]

    async def script(request: fe.FakeRequest) -> None:
        reason = ends[len(service.engine.requests) % 2]
        stop = 13874 if reason == fe.STOP else None
        await request.send([13874], request.finish(reason, stop_token_id=stop, extra_tokens=1))

    async with running(default_model(), script) as service, http(service) as client:
        found = []
        for _ in range(2):
            choice = (await client.post(CHAT, json=body_of(CHAT, stop_token_ids=[13874]))).json()["choices"][0]
            found.append((choice["finish_reason"], choice["stop_reason"], choice["message"]["content"]))
        assert sorted(found, key=str) == [("length", None, " pepper"), ("stop", 13874, "")]


async def test_prompts_of_a_list_are_choices_in_order() -> None:
    async def echo_back(request: fe.FakeRequest) -> None:
        await request.play([*request.prompt, request.prompt[0]], eos=2)

    async with running(default_model(), echo_back) as service, http(service) as client:
        body = {"prompt": [[1000], [2000, 2001], "hi"], "return_token_ids": True}
        plain = (await client.post(COMPLETIONS, json=body)).json()
        assert [choice["index"] for choice in plain["choices"]] == [0, 1, 2]
        assert [choice["token_ids"][:-2] for choice in plain["choices"]] == [[1000], [2000, 2001], [6004]]
        assert plain["usage"]["prompt_tokens"] == 4
        chunks = events((await client.post(COMPLETIONS, json=body | {"stream": True})).text)[:-1]
        for index in range(3):
            text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index)
            assert text == plain["choices"][index]["text"]


@pytest.mark.parametrize("prompt", ["Hello there", [5, 6, 7], ["Hello", [5, 6]]])
async def test_an_echo_comes_first(prompt: Any) -> None:
    async with running(default_model(), play_script) as service, http(service) as client:
        shown = (await client.post("/detokenize", json={"tokens": [5, 6, 7]})).json()["prompt"]
        expected = "Hello" if isinstance(prompt[0], str) and not isinstance(prompt, str) else prompt
        expected = shown if expected == [5, 6, 7] else expected
        for stream in (False, True):
            body = body_of(COMPLETIONS, prompt=prompt, echo=True, stream=stream)
            answer = await client.post(COMPLETIONS, json=body)
            if stream:
                chunks = events(answer.text)[:-1]
                text = "".join(c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == 0)
            else:
                text = answer.json()["choices"][0]["text"]
            assert text == f"{expected}{TEXT}"


@pytest.mark.parametrize("path", PATHS)
async def test_a_refusal_before_the_first_token_is_a_status(path: str) -> None:
    """The engine's full queue is 429, also of a stream."""

    async def refuse(request: fe.FakeRequest) -> None:
        error = fe.error(8, "64 requests wait, the limit is 64")
        await request.send([], request.finish(fe.ERROR, error=error))

    async with running(default_model(), refuse) as service, http(service) as client:
        for stream in (False, True):
            answer = await client.post(path, json=body_of(path, stream=stream))
            assert error_of(answer, 429)["message"] == "64 requests wait, the limit is 64"
            assert answer.headers["retry-after"]


@pytest.mark.parametrize(("path", "prompts"), [*((path, 1) for path in PATHS), (COMPLETIONS, 3)])
async def test_an_engine_that_dies_in_mid_stream(path: str, prompts: int) -> None:
    """The stream ends with an error event, without what marks a good end; it has the usage of what was delivered."""
    async with running(default_model(), fe.chain_until_cancelled) as service, http(service) as client:
        body = body_of(path, stream=True) | ({"prompt": ["a", "b", "c"]} if prompts > 1 else {})
        if path != RESPONSES:
            body |= {"stream_options": {"include_usage": True}, "return_token_ids": True}
        async with client.stream("POST", path, json=body) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            text = await anext(lines)
            await service.engine.break_sessions()
            text += "\n" + "\n".join([line async for line in lines])
        found = events(text + "\n\n")
        if path == RESPONSES:
            check_failed_response(found)
        last = found[-1] if path != RESPONSES else found[-2]
        assert (last.get("type") if path == RESPONSES else last["error"]["code"]) in ("error", "service_unavailable")
        assert not any(event == "[DONE]" or event.get("type") == "response.completed" for event in found)
        reasons = [choice["finish_reason"] for event in found[:-1] for choice in event.get("choices", ())]
        assert set(reasons) <= {None}
        if path != RESPONSES:
            choices = [choice for event in found[:-1] for choice in event["choices"]]
            usage = last["error"]["usage"]
            sent = sum(len(choice.get("token_ids", ())) for choice in choices)
            # With the one prompt that fails the others end, in whatever they were just about to send.
            assert usage["completion_tokens"] == sent > 0 if prompts == 1 else usage["completion_tokens"] >= sent > 0
            assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
            assert usage["prompt_tokens"] > 0


def check_failed_response(found: list[Any]) -> None:
    """The last event is response.failed: with the error, what had come, and no end of any item."""
    kinds = [event["type"] for event in found]
    assert kinds[-2:] == ["error", "response.failed"]
    assert kinds.count("response.failed") == 1
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    ends = {"response.completed", "response.incomplete", "response.output_item.done", "response.output_text.done"}
    assert not ends & set(kinds)
    response = found[-1]["response"]
    assert response["status"] == "failed"
    usage = response["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert min(usage["input_tokens"], usage["output_tokens"]) > 0
    assert response["error"] == {"code": "server_error", "message": found[-2]["message"]}
    came = "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    (item,) = response["output"]
    assert (item["status"], item["content"][0]["text"]) == ("incomplete", came)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_leaving_before_the_first_token(path: str, stream: bool) -> None:
    async with running(default_model(), fe.until_cancelled) as service, http(service) as client:
        task = asyncio.create_task(client.post(path, json=body_of(path, stream=stream)))
        await service.engine.wait_until(lambda: service.engine.num_live == 1)
        task.cancel()
        await service.engine.wait_until(lambda: service.engine.num_cancelled == 1)
        await cancelled(service, 1)


@pytest.mark.parametrize("path", PATHS)
async def test_leaving_in_mid_stream(path: str) -> None:
    async with running(default_model(), fe.chain_until_cancelled) as service, http(service) as client:
        async with client.stream("POST", path, json=body_of(path, stream=True)) as answer:
            await anext(answer.aiter_bytes())
        await service.engine.wait_until(lambda: service.engine.num_cancelled == 1)
        await cancelled(service, 1)


async def test_leaving_a_list_of_prompts_cancels_all() -> None:
    async with running(default_model(), fe.chain_until_cancelled) as service, http(service) as client:
        body = {"prompt": [[number] for number in range(5, 13)], "stream": True}
        async with client.stream("POST", COMPLETIONS, json=body) as answer:
            await anext(answer.aiter_bytes())
        await service.engine.wait_until(lambda: service.engine.num_live == 0)
        await cancelled(service, 8)


async def cancelled(service: Service, count: int) -> None:
    """All that ran is counted as cancelled, and nothing is left (B123, B141)."""
    await eventually(lambda: service.metric("active_requests") == 0)
    by_code = {code: number for (_, code), number in service.outcomes().items()}
    assert by_code == {"CANCELLED": count}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_deadline_before_the_first_token(path: str, stream: bool) -> None:
    async with running(default_model(), fe.until_cancelled) as service, http(service) as client:
        headers = {"x-request-timeout": "0.1"}
        answer = await client.post(path, json=body_of(path, stream=stream), headers=headers)
        assert error_of(answer, 504)["code"] == "deadline_exceeded"
        await service.engine.wait_until(lambda: service.engine.num_cancelled == 1)


async def test_a_deadline_in_mid_stream() -> None:
    async with running(default_model(), fe.chain_until_cancelled) as service, http(service) as client:
        answer = await client.post(CHAT, json=body_of(CHAT, stream=True), headers={"x-request-timeout": "0.2"})
        found = events(answer.text)
        assert found[-1]["error"]["code"] == "deadline_exceeded"
        assert "[DONE]" not in found


@pytest.mark.parametrize("text", ["0", "-1", "soon", "nan", "inf", "1e9"])
async def test_a_deadline_that_is_none(text: str) -> None:
    async with running(default_model(), play_script) as service, http(service) as client:
        answer = await client.post(CHAT, json=body_of(CHAT), headers={"x-request-timeout": text})
        assert error_of(answer, 400)["param"] == "X-Request-Timeout"


async def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    release = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        await request.send([SCRIPT[0]])
        await release.wait()
        await request.play(SCRIPT[1:], eos=2)

    async with (
        running(default_model(), script) as service,
        http(service) as client,
        client.stream("POST", CHAT, json=body_of(CHAT, stream=True)) as answer,
    ):
        lines = answer.aiter_lines()
        begin = await anext(lines)
        drain = asyncio.create_task(service.app.drain())
        await service.wait_health(False)
        error_of(await client.get("/ready"), 503)
        assert (await client.get("/health")).status_code == 200
        error_of(await client.post(CHAT, json=body_of(CHAT)), 503)
        release.set()
        text = "\n".join([begin, *[line async for line in lines]])
        found = events(text)
        assert "".join(c["choices"][0]["delta"].get("content", "") for c in found[:-1]) == TEXT
        await drain


async def test_stopping_ends_streams_with_an_error() -> None:
    async with running(default_model(), fe.chain_until_cancelled) as service, http(service) as client:
        async with client.stream("POST", CHAT, json=body_of(CHAT, stream=True)) as answer:
            lines = answer.aiter_lines()
            begin = await anext(lines)
            stop = asyncio.create_task(service.app.stop())
            found = events("\n".join([begin, *[line async for line in lines]]))
            assert found[-1]["error"]["code"] == "service_unavailable"
            await stop
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")


async def test_many_streams_at_once_each_with_its_own_text() -> None:
    async def script(request: fe.FakeRequest) -> None:
        await request.play([request.prompt[0] + number for number in range(1, 20)])

    async with running(default_model(), script) as service, http(service) as client:
        bodies = [{"prompt": [1000 + 25 * n], "stream": True, "return_token_ids": True} for n in range(200)]
        answers = await asyncio.gather(*(client.post(COMPLETIONS, json=body) for body in bodies))
        for body, answer in zip(bodies, answers, strict=True):
            ids = [i for e in events(answer.text)[:-1] for i in e["choices"][0].get("token_ids", [])]
            assert ids == list(range(body["prompt"][0] + 1, body["prompt"][0] + 20))  # type: ignore[index]
