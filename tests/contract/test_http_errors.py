"""Everything that is wrong with an HTTP request: the exact status, OpenAI's error object, nothing of ours inside."""

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.http_calls import CHAT, COMPLETIONS, HELLO, RESPONSES, body_of, error_of, http, text_of
from tests.fixtures.tokenizer_app import default_model, running

GOOD = [1000 + number for number in range(100)]
LARGE_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"title": "x" * 70_000}}}
JSON = {"content-type": "application/json"}


async def script(request: fe.FakeRequest) -> None:
    if request.client_id.startswith("good"):
        for token_id in GOOD:
            await request.send([token_id])
            await asyncio.sleep(0)
    await request.play([1000], eos=2)


# (path, request, status, param): each is sent plain and as a stream, beside good streams.
HOSTILE: list[tuple[str, dict[str, Any], int, str | None]] = [
    (COMPLETIONS, {"prompt": ""}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [""]}, 400, "prompt[0]"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, 400, "prompt[0]"),
    (COMPLETIONS, {"prompt": None}, 400, "prompt"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": ["a", ""]}, 400, "prompt[1]"),
    (COMPLETIONS, {"prompt": [1, -1]}, 400, "prompt[1]"),
    (COMPLETIONS, {"prompt": [[1], [5, 49152]]}, 400, "prompt[1][1]"),
    (COMPLETIONS, {"prompt": [2**70]}, 400, "prompt[0]"),
    (COMPLETIONS, {"prompt": [1] * 8192}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "word " * 9000}, 400, "prompt"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2**63}, 400, "max_tokens"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": 10, "max_tokens": 5}, 400, "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "min_tokens": -1}, 400, "min_tokens"),
    (COMPLETIONS, {"prompt": "a", "logprobs": 21}, 400, "logprobs"),
    (COMPLETIONS, {"prompt": "a", "n": 0}, 400, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 65}, 400, "n"),
    (COMPLETIONS, {"prompt": "a", "n": 2, "best_of": 4}, 400, "best_of"),
    (COMPLETIONS, {"prompt": "a", "suffix": "b"}, 400, "suffix"),
    (COMPLETIONS, {"prompt": "a", "stop": ""}, 400, "stop[0]"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x", ""]}, 400, "stop[1]"),
    (COMPLETIONS, {"prompt": "a", "stop": ["x"] * 5000}, 400, "stop"),
    (COMPLETIONS, {"prompt": "a", "stop": "x" * 100_000}, 400, "stop[0]"),
    (COMPLETIONS, {"prompt": "a", "stop": [1]}, 400, "stop[0]"),
    (COMPLETIONS, {"prompt": "a", "temperature": -0.1}, 400, "temperature"),
    (COMPLETIONS, {"prompt": "a", "top_p": 0}, 400, "top_p"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"49152": 1}}, 400, "logit_bias"),
    (COMPLETIONS, {"prompt": "a", "bad_words": ["b", "c", "d " * 99]}, 400, "bad_words[2]"),
    (COMPLETIONS, {"prompt": "a", "model": "gpt-4"}, 404, "model"),
    (COMPLETIONS, {"prompt": "a", "echo": True, "model": "gpt-4"}, 404, "model"),
    (COMPLETIONS, {"prompt": [49152], "echo": True}, 400, "prompt"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, 400, "max_completion_tokens"),
    (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    (CHAT, {"messages": HELLO, "tool_choice": "required"}, 400, "tool_choice"),
    (CHAT, {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "a b"}}]}, 400, "tools[0].function"),
    (CHAT, {"messages": HELLO, "chat_template": "x"}, 400, "chat_template"),
    (CHAT, {"messages": HELLO, "functions": []}, 400, "functions"),
    (CHAT, {"messages": HELLO, "response_format": LARGE_SCHEMA}, 400, "response_format.json_schema.schema"),
    (CHAT, {"messages": [{"role": "", "content": "x"}]}, 400, "messages[0].role"),
    (RESPONSES, {"input": []}, 400, "input"),
    (RESPONSES, {"input": "a", "max_output_tokens": 0}, 400, "max_output_tokens"),
    (RESPONSES, {"input": "a", "previous_response_id": "x"}, 400, "previous_response_id"),
]  # fmt: skip


async def test_hostile_values_beside_good_streams() -> None:
    """B021, B027, B028, B093, B098: uniform for plain and streamed requests."""
    async with running(default_model(), script) as service, http(service) as client:
        good = [
            asyncio.create_task(
                client.post(CHAT, json=body_of(CHAT, stream=True), headers={"x-request-id": f"good-{n}"})
            )
            for n in range(3)
        ]
        for path, value, status, param in HOSTILE:
            for stream in (False, True):
                answer = await client.post(path, json={**value, "stream": stream})
                error = error_of(answer, status)
                assert param is None or str(error["param"]).startswith(param), (value, error)
        texts = {text_of(CHAT, await task) for task in good}
        assert len(texts) == 1
        assert (await client.get("/health")).status_code == 200
        assert service.metric("active_requests") == 0
        assert service.engine.num_live == 0


async def test_an_unknown_field_of_every_endpoint_is_named() -> None:
    async with running(default_model(), script) as service, http(service) as client:
        bodies = {path: body_of(path) for path in (CHAT, COMPLETIONS, RESPONSES)}
        bodies |= {"/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}}
        for path, body in bodies.items():
            assert (await client.post(path, json=body)).status_code == 200
            assert error_of(await client.post(path, json=body | {"surprise": 1}), 400)["param"] == "surprise"


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"tokens": [-1]}, "tokens"),
        ({"tokens": [2**32]}, "tokens"),
        ({"tokens": [2**63]}, "tokens"),
        ({"tokens": [49152]}, "tokens"),
        ({"tokens": ["1"]}, "tokens[0]"),
        ({}, "tokens"),
        ({"tokens": [1], "model": "x"}, "model"),
    ],
)
async def test_detokenize_refuses(value: dict[str, Any], param: str) -> None:
    """B095."""
    async with running(default_model(), script) as service, http(service) as client:
        answer = await client.post("/detokenize", json=value)
        assert error_of(answer, 404 if "model" in value else 400)["param"] == param


async def test_tokenize_and_detokenize() -> None:
    """B095, B108."""
    async with running(default_model(), script) as service, http(service) as client:
        answer = (await client.post("/tokenize", json={"prompt": "a\0b"})).json()
        assert answer == {"count": 3, "max_model_len": 8192, "tokens": [81, 190, 82]}
        assert (await client.post("/detokenize", json={"tokens": [81, 190, 82]})).json() == {"prompt": "a\0b"}
        assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
        chat = (await client.post("/tokenize", json={"messages": HELLO})).json()["tokens"]
        closed = (await client.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False})).json()
        assert closed["tokens"] == chat[: closed["count"]]
        for wrong in ({}, {"prompt": "a", "messages": HELLO}, {"prompt": "a", "add_generation_prompt": True}):
            error_of(await client.post("/tokenize", json=wrong), 400)


async def test_what_is_wrong_before_any_field() -> None:
    async with running(default_model(), script, max_request_bytes=4096) as service, http(service) as client:
        assert error_of(await client.get("/v1/nothing"), 404)["code"] == "not_found"
        answer = await client.get(CHAT)
        assert error_of(answer, 405)["code"] == "method_not_allowed"
        assert answer.headers["allow"] == "POST"
        error_of(await client.post(CHAT, content=b"{}", headers={"content-type": "text/plain"}), 415)
        error_of(await client.post(CHAT, content=b"{}"), 415)
        error_of(await client.post(CHAT, content=b"{", headers=JSON), 400)
        error_of(await client.post(CHAT, content=b'{"a":' * 800, headers=JSON), 400)
        error_of(await client.post(CHAT, content=b'{"messages": "\xff"}', headers=JSON), 400)
        error_of(await client.post(CHAT, content=b" " * 4097, headers=JSON), 413)

        async def parts() -> Any:
            for _ in range(50):
                yield b" " * 100

        error_of(await client.post(CHAT, content=parts(), headers=JSON), 413)
        assert (await client.post(CHAT, json=body_of(CHAT))).status_code == 200  # on the same connections


async def test_request_ids() -> None:
    """B107: an id of the client's is kept; one that is too long or not printable is refused and not echoed."""
    async with running(default_model(), script) as service, http(service) as client:
        answer = await client.post(CHAT, json=body_of(CHAT), headers={"x-request-id": "mine-1"})
        assert (answer.headers["x-request-id"], answer.json()["id"]) == ("mine-1", "chatcmpl-mine-1")
        assert [request.client_id for request in service.engine.requests] == ["mine-1"]
        for bad in ("x" * 257, "x" * 60_000, "tab\tx", "caf\xe9".encode("latin-1")):
            refused = await client.post(CHAT, json=body_of(CHAT), headers={"x-request-id": bad})
            assert error_of(refused, 400)["param"] == "X-Request-Id"
            assert len(refused.content) + len(refused.headers["x-request-id"]) < 400


@pytest.mark.parametrize("stream", [False, True])
async def test_ids_of_several_prompts(stream: bool) -> None:
    """B107: the prompts' ids are the request's with a number, so that a long one leaves room for it."""
    async with running(default_model(), script) as service, http(service) as client:
        for prompts, longest in ((1, 256), (2, 254), (10, 254), (11, 253)):
            body = body_of(COMPLETIONS, prompt=["a"] * prompts, stream=stream)
            good = await client.post(COMPLETIONS, json=body, headers={"x-request-id": "x" * longest})
            assert good.status_code == 200, good.text
            assert good.headers["x-request-id"] == "x" * longest
            ids = {request.message.request_id for request in service.engine.requests}
            assert {(len(each), each.startswith("x" * 200)) for each in ids} == {(256, True)}
            assert len(ids) == prompts
            service.engine.requests.clear()
            if prompts > 1:
                refused = await client.post(COMPLETIONS, json=body, headers={"x-request-id": "x" * (longest + 1)})
                error = error_of(refused, 400)
                assert error["param"] == "X-Request-Id"
                assert f"{longest + 1} characters exceed the limit of {longest} with {prompts}" in error["message"]
                assert service.engine.requests == []


async def test_an_id_that_is_running_is_409() -> None:
    async with running(default_model(), fe.until_cancelled) as service, http(service) as client:
        first = asyncio.create_task(client.post(CHAT, json=body_of(CHAT), headers={"x-request-id": "same"}))
        await service.engine.wait_until(lambda: service.engine.num_live == 1)
        error_of(await client.post(CHAT, json=body_of(CHAT), headers={"x-request-id": "same"}), 409)
        first.cancel()


async def test_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(hashlib.sha256(b"filed").hexdigest())
    settings = {"api_key": ("plain",), "api_key_file": str(file)}
    async with running(default_model(), script, **settings) as service, http(service) as client:
        for path in ("/", "/health", "/ready"):
            assert (await client.get(path)).status_code == 200
        for path in ("/v1/models", "/metrics", "/nothing"):
            answer = await client.get(path)
            assert error_of(answer, 401)["code"] == "missing_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
        for wrong in ("Bearer other", "Basic plain"):
            error_of(await client.post(CHAT, json=body_of(CHAT), headers={"authorization": wrong}), 401)
        for key in ("plain", "filed"):
            good = await client.post(CHAT, json=body_of(CHAT), headers={"authorization": f"Bearer {key}"})
            assert good.status_code == 200


async def test_other_origins_only_when_told() -> None:
    origin = {"origin": "https://app.example"}
    preflight = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    async with running(default_model(), script) as service, http(service) as client:
        assert not [
            name for name in (await client.get("/v1/models", headers=origin)).headers if "access-control" in name
        ]
        error_of(await client.options(CHAT, headers=preflight), 405)
    settings = {"cors_origin": ("https://app.example",), "api_key": ("k",)}
    async with running(default_model(), script, **settings) as service, http(service) as client:
        assert (await client.options(CHAT, headers=preflight)).status_code == 200
        for answer in (await client.get("/v1/models", headers=origin), await client.get("/health", headers=origin)):
            assert answer.headers["access-control-allow-origin"] == "https://app.example"
        other = await client.get("/health", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers


async def test_no_engine_is_503_and_not_ready() -> None:
    async with running(default_model(), script, wait=False) as service:
        await service.engine.stop()
        await service.wait_health(False)
        async with http(service) as client:
            assert (await client.get("/health")).status_code == 200
            ready = await client.get("/ready")
            assert error_of(ready, 503)["code"] == "not_ready"
            for stream in (False, True):
                answer = await client.post(CHAT, json=body_of(CHAT, stream=stream))
                assert error_of(answer, 503)["code"] == "service_unavailable"
                assert int(answer.headers["retry-after"]) >= 1


async def test_request_number_limit_plus_one_is_429() -> None:
    """B118, over HTTP."""
    async with running(default_model(), fe.until_cancelled, max_requests=2) as service, http(service) as client:
        held = [asyncio.create_task(client.post(CHAT, json=body_of(CHAT))) for _ in range(2)]
        await service.engine.wait_until(lambda: service.engine.num_live == 2)
        for stream in (False, True):
            answer = await client.post(CHAT, json=body_of(CHAT, stream=stream))
            error = error_of(answer, 429)
            assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
            assert int(answer.headers["retry-after"]) >= 1
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        await service.engine.wait_until(lambda: service.engine.num_live == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_nothing_is_encoded_or_decoded_for_a_request_without_a_place(stream: bool) -> None:
    """B118: words that may not come, and token ids to echo."""
    async with running(default_model(), fe.until_cancelled, max_requests=1) as service, http(service) as client:
        held = asyncio.create_task(client.post(CHAT, json=body_of(CHAT)))
        await service.engine.wait_until(lambda: service.engine.num_live == 1)
        encoded = service.metric("encode_seconds_count")
        for fields in ({"bad_words": ["a", "b"]}, {"prompt": [49_152], "echo": True}):
            error_of(await client.post(COMPLETIONS, json=body_of(COMPLETIONS, stream=stream, **fields)), 429)
        assert service.metric("encode_seconds_count") == encoded
        assert service.outcomes()["HttpCompletions", "RESOURCE_EXHAUSTED"] == 2
        held.cancel()
        await service.engine.wait_until(lambda: service.engine.num_live == 0)
        refused = await client.post(COMPLETIONS, json=body_of(COMPLETIONS, prompt=[49_152], echo=True))
        error_of(refused, 400)
        assert service.metric("active_requests") == 0


async def test_models_and_metrics() -> None:
    async with running(default_model(), script) as service, http(service) as client:
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["object"], model["max_model_len"]) == ("model", 8192)
        assert (await client.get(f"/v1/models/{model['id']}")).json() == model
        assert error_of(await client.get("/v1/models/org/other"), 404)["code"] == "model_not_found"
        await client.post(CHAT, json=body_of(CHAT))
        text = (await client.get("/metrics")).text
        assert 'tokenwire_tokenizer_http_responses_total{route="/v1/chat/completions",status="200"} 1.0' in text
        assert 'tokenwire_tokenizer_requests_total{code="OK",method="HttpChat"} 1.0' in text


async def test_the_page_lets_only_its_own_script_run() -> None:
    async with running(default_model(), script) as service, http(service) as client:
        page: httpx.Response = await client.get("/")
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert page.text.count("<script>") == page.text.count("<style>") == 1
        assert "http://" not in page.text.replace("http://www.w3.org/2000/svg", "")
        for inline in (" onclick=", " onload=", " style="):
            assert inline not in page.text
