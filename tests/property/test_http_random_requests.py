"""Random values in every field of HTTP requests: an answer or a 4xx that names a field, never a failure of ours."""

import json
import random
from typing import Any

import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.http_calls import CHAT, COMPLETIONS, RESPONSES, body_of, events, http
from tests.fixtures.tokenizer_app import default_model, eventually, running
from tokenizer_service.http.chat_fields import ChatFields
from tokenizer_service.http.completion_fields import CompletionFields
from tokenizer_service.http.response_fields import ResponseFields

KINDS = {CHAT: ChatFields, COMPLETIONS: CompletionFields, RESPONSES: ResponseFields}
NUMBERS = [
    0,
    1,
    -1,
    2,
    0.5,
    -0.0,
    1.5,
    20,
    21,
    64,
    65,
    255,
    8191,
    8192,
    49151,
    49152,
    2**31,
    2**32,
    2**63,
    -(2**63),
    1e300,
    1e-300,
]
TEXTS = [
    "",
    "a",
    "Hello there",
    "\0",
    "🌶",
    "<|im_end|>",
    "x" * 2000,
    "auto",
    "none",
    "required",
    "user",
    "text",
    "json_object",
]
SCALARS = [*NUMBERS, *TEXTS, True, False, None]


def value(dice: random.Random, depth: int = 3) -> Any:
    kind = dice.random()
    if depth == 0 or kind < 0.6:
        return dice.choice(SCALARS)
    if kind < 0.8:
        return [value(dice, depth - 1) for _ in range(dice.randrange(4))]
    keys = dice.sample(
        ["type", "text", "role", "content", "function", "name", "json", "regex", "1", "5", "schema"], dice.randrange(4)
    )
    return {key: value(dice, depth - 1) for key in keys}


def request(dice: random.Random, path: str) -> dict[str, Any]:
    """A good request in which some fields hold whatever comes."""
    names = [name for name in KINDS[path].model_fields if name != "stream"]
    changed = {name: value(dice) for name in dice.sample(names, dice.choice([1, 1, 1, 2, 4]))}
    return body_of(path, stream=dice.random() < 0.5) | changed


async def script(request: fe.FakeRequest) -> None:
    """Each of the n samples gets two tokens."""
    for index in range(request.message.sampling.n or 1):
        await request.session.send([request.output([1000], index=index)])
        await request.session.send([request.output([2], request.finish(fe.STOP, stop_token_id=2), index=index)])


@pytest.mark.parametrize("path", list(KINDS))
async def test_no_value_makes_a_failure_of_ours(path: str) -> None:
    dice = random.Random(path)
    served = 0
    async with running(default_model(), script) as service, http(service) as client:
        for _ in range(120):
            body = request(dice, path)
            answer = await client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            served += answer.status_code == 200
            if answer.status_code != 200:
                error = answer.json()["error"]
                assert error["param"], body
                assert len(answer.content) < 2000
            elif body["stream"]:
                assert not any(
                    "error" in event
                    for event in events(answer.text)
                    if isinstance(event, dict) and "response" not in event
                )
        await eventually(lambda: service.metric("active_requests") == 0)
        codes = {code for _, code in service.outcomes()}
        assert codes <= {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "CANCELLED"}
    assert served > 5
