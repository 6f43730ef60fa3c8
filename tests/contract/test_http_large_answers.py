"""An answer with many log probabilities takes long to write: it is written where it holds up no other request."""

import asyncio
import threading

import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.http_calls import CHAT, COMPLETIONS, body_of, error_of, http
from tests.fixtures.tokenizer_app import default_model, running
from tokenizer_service.http.chat import ChatAnswer
from tokenizer_service.http.completions import CompletionAnswer
from tokenwire.common.v1 import logprobs_pb2


def position(token_id: int) -> logprobs_pb2.PositionLogprobs:
    top = [logprobs_pb2.TokenLogprob(token_id=token_id + place, logprob=-float(place)) for place in range(20)]
    return logprobs_pb2.PositionLogprobs(token=top[0], rank=1, top=top)


@pytest.mark.parametrize(("tokens", "thread"), [(8, "MainThread"), (2000, "encode-")])
@pytest.mark.parametrize(
    ("path", "kind", "fields"),
    [(CHAT, ChatAnswer, {"logprobs": True, "top_logprobs": 20}), (COMPLETIONS, CompletionAnswer, {"logprobs": 20})],
)
async def test_many_log_probabilities_are_written_in_a_thread(
    path: str,
    kind: type[ChatAnswer | CompletionAnswer],
    fields: dict[str, object],
    tokens: int,
    thread: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def script(request: fe.FakeRequest) -> None:
        ids = list(range(1000, 1000 + tokens))
        await request.send(ids, request.finish(extra_tokens=tokens), logprobs=[position(token_id) for token_id in ids])

    threads: list[str] = []
    written = kind.body

    def body(answer: ChatAnswer | CompletionAnswer) -> bytes:
        threads.append(threading.current_thread().name)
        return written(answer)  # type: ignore[arg-type]

    monkeypatch.setattr(kind, "body", body)
    async with running(default_model(), script) as service, http(service) as client:
        answer = await client.post(path, json=body_of(path, max_tokens=tokens, **fields))
    logprobs = answer.json()["choices"][0]["logprobs"]
    assert len(logprobs["content" if path == CHAT else "tokens"]) == tokens
    assert len(threads) == 1
    assert threads[0].startswith(thread)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_more_log_probabilities_than_one_answer_holds(path: str) -> None:
    """Refused with the numbers before anything runs where they are asked for; a stream may have any number."""
    field = "top_logprobs" if path == CHAT else "logprobs"
    wanted = {"logprobs": True, "top_logprobs": 20} if path == CHAT else {"logprobs": 20}

    async def script(request: fe.FakeRequest) -> None:
        await request.send([1000], request.finish(extra_tokens=1), logprobs=[position(1000)])

    async with running(default_model(), script) as service, http(service) as client:
        for max_tokens, n in ((4096, 7), (2**62, 4)):
            error = error_of(await client.post(path, json=body_of(path, max_tokens=max_tokens, n=n, **wanted)), 400)
            assert error["param"] == field
            assert f"{min(max_tokens, 8192) * n * 21:,}" in error["message"]
            assert "524,288" in error["message"]
        assert service.engine.requests == []
        assert (await client.post(path, json=body_of(path, max_tokens=2**62, **wanted))).status_code == 200
        body = body_of(path, max_tokens=8000, n=4, stream=True, **wanted)
        streaming = asyncio.create_task(client.post(path, json=body))
        await service.engine.wait_until(lambda: len(service.engine.requests) == 2)
        streaming.cancel()


async def test_an_answer_that_grows_too_large_ends() -> None:
    """Without max_tokens nothing is refused in advance; the request ends when there are too many."""
    ids = [1000] * 2000

    async def script(request: fe.FakeRequest) -> None:
        for _ in range(20):
            for index in range(2):
                await request.send(ids, logprobs=[position(1000)] * len(ids), index=index)
        await request.cancelled.wait()

    async with running(default_model(), script) as service, http(service) as client:
        body = body_of(CHAT, logprobs=True, top_logprobs=20, n=2)
        error = error_of(await client.post(CHAT, json=body), 400)
        assert error["param"] == "top_logprobs"
        assert "524,288" in error["message"]
        await service.engine.wait_until(lambda: service.engine.num_live == 0)
