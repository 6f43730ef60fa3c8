"""An answer with many log probabilities takes long to write: it is written where it holds up no other request."""

import threading

import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.http_calls import CHAT, COMPLETIONS, body_of, http
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
