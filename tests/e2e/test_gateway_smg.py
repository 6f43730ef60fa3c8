"""The real, unmodified gateway in front of the real engine: two releases that differ in how they cancel.

They are installed from PyPI, hence slow. Must not know: how the facade works.
"""

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tests.fixtures.checkpoints import SCRIPT_S1_TEXT, SUCC_EOS, succ_successor, write_succ
from tests.fixtures.engine_process import EngineProcess, started_engine
from tests.fixtures.smg import Gateway, facade_url, running_smg
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

VERSIONS = ("1.13.0", "1.9.0")
FLAGS = (
    *("--vllm-compat-port=0", "--served-model-name=succ", "--max-num-requests=4", "--max-waiting-requests=4"),
    "--hung-step-timeout=0",
)


@pytest.fixture(scope="module")
def succ(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_succ(tmp_path_factory.mktemp("checkpoints") / "succ", resolve_model_folder(DEFAULT_MODEL))


@pytest.fixture(scope="module")
def engine(succ: Path) -> Iterator[EngineProcess]:
    with started_engine(succ, *FLAGS) as running:
        yield running
        assert running.process.poll() is None


@pytest.fixture(params=VERSIONS)
async def gateway(request: pytest.FixtureRequest, engine: EngineProcess, tmp_path: Path) -> AsyncIterator[Gateway]:
    async with running_smg(request.param, [facade_url(engine)], tmp_path / "smg.log") as running:
        yield running


async def load(engine: EngineProcess) -> engine_pb2.GetLoadResponse:
    async with grpc.aio.insecure_channel(engine.address) as channel:
        return await engine_pb2_grpc.EngineServiceStub(channel).GetLoad(engine_pb2.GetLoadRequest())


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> None:
    """Polls another process, which cannot notify us."""
    async with asyncio.timeout(timeout_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def until_free(engine: EngineProcess, timeout_s: float = 1.0) -> None:
    async def is_free() -> bool:
        found = await load(engine)
        return found.running_requests == found.waiting_requests == found.used_blocks == 0

    await until(is_free, timeout_s)


async def until_running(engine: EngineProcess) -> None:
    async def is_running() -> bool:
        return (await load(engine)).running_requests > 0

    await until(is_running, 10.0)


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "succ", "prompt": "Hello", "max_tokens": 20, "temperature": 0, **fields}


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "succ", "messages": messages, "max_tokens": 20, "temperature": 0, **fields}


ENDLESS = {"max_tokens": 8000, "ignore_eos": True}


async def streamed(gateway: Gateway, path: str, body: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    """Text, finish reason and usage of a stream."""
    text, reason, usage = "", None, {}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with gateway.http.stream("POST", path, json={**body, **options}) as answer:
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            usage = event.get("usage") or usage
            for choice in event.get("choices", []):
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                reason = choice.get("finish_reason") or reason
    return text, reason, usage


async def whole(gateway: Gateway, path: str, body: dict[str, Any]) -> tuple[str, Any, dict[str, Any]]:
    answer = await gateway.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    return text, choice["finish_reason"], answer.json()["usage"]


def counts(usage: dict[str, Any]) -> tuple[int, int, int]:
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def expected_chat(folder: Path, count: int) -> str:
    """What SUCC says after the newline that ends every chat prompt of its template."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token, said = tokenizer.encode("\n").ids[-1], []
    while len(said) < count and (token := succ_successor(token)) != SUCC_EOS:
        said.append(token)
    return tokenizer.decode(said)


async def test_completions_and_chat_streamed_and_not(gateway: Gateway, succ: Path) -> None:
    assert gateway.ready_seconds < 20
    for path, body, wanted in (
        ("/v1/completions", completion(), (SCRIPT_S1_TEXT, "stop")),
        ("/v1/completions", completion(max_tokens=5), (" 🌶 pepper DEF"[:9], "length")),
        ("/v1/chat/completions", chat(max_tokens=10), (expected_chat(succ, 10), "length")),
    ):
        plain, stream = await whole(gateway, path, body), await streamed(gateway, path, body)
        assert plain[:2] == stream[:2]
        assert counts(plain[2]) == counts(stream[2])
        if wanted[1] == "stop" or path.endswith("chat/completions"):
            assert plain[:2] == wanted
        assert plain[2]["completion_tokens"] == (12 if wanted[1] == "stop" else body["max_tokens"])


async def test_a_stop_string_ends_the_work_in_the_engine(gateway: Gateway, engine: EngineProcess) -> None:
    before = (await load(engine)).generated_tokens_total
    body = completion(stop=["DEF"], **ENDLESS)
    plain, stream = (
        await whole(gateway, "/v1/completions", body),
        await streamed(gateway, "/v1/completions", body),
    )
    assert plain[:2] == stream[:2] == (SCRIPT_S1_TEXT.split("DEF")[0], "stop")
    await until_free(engine)
    # Two short answers, not two of 8,000 tokens; a few more steps may run until the match arrives.
    assert (await load(engine)).generated_tokens_total - before < 2000


async def test_samples_and_log_probabilities(gateway: Gateway) -> None:
    body = chat(n=2, logprobs=True, top_logprobs=2, max_tokens=8)
    answer = (await gateway.http.post("/v1/chat/completions", json=body)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        tokens = choice["logprobs"]["content"]
        assert len(tokens) == 8
        assert all(token["top_logprobs"][0]["token"] == token["token"] for token in tokens)
        assert all(-0.01 < token["logprob"] <= 0 for token in tokens)
    assert answer["usage"]["completion_tokens"] == 16


async def test_a_prompt_over_the_context_is_400(gateway: Gateway, engine: EngineProcess) -> None:
    for stream in (False, True):
        answer = await gateway.http.post("/v1/completions", json=completion(prompt=" a" * 9000, stream=stream))
        assert answer.status_code == 400, answer.text
    # Exactly as long as the context passes the gateway; the engine refuses it.
    answer = await gateway.http.post("/v1/completions", json=completion(prompt=" a" * 8192))
    assert answer.status_code == 400, answer.text
    assert "8,192" in answer.text
    await until_free(engine)


async def test_a_full_queue_is_429(gateway: Gateway, engine: EngineProcess) -> None:
    bodies = [completion(stream=place % 2 == 0, **ENDLESS) for place in range(10)]
    os.kill(engine.engine_pid, signal.SIGSTOP)
    calls = [asyncio.create_task(gateway.http.post("/v1/completions", json=body)) for body in bodies]
    try:
        await asyncio.sleep(0.5)  # all are on their way: a stopped process cannot tell
    finally:
        os.kill(engine.engine_pid, signal.SIGCONT)
    async with asyncio.timeout(30):
        done, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
    assert {call.result().status_code for call in done} == {429}
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    await until_free(engine, 5.0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_before_the_first_token(
    gateway: Gateway, engine: EngineProcess, stream: bool
) -> None:
    before = (await load(engine)).generated_tokens_total
    os.kill(engine.engine_pid, signal.SIGSTOP)
    try:
        call = asyncio.create_task(gateway.http.post("/v1/completions", json=completion(stream=stream, **ENDLESS)))
        await asyncio.sleep(0.5)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await asyncio.sleep(0.5)
    finally:
        os.kill(engine.engine_pid, signal.SIGCONT)
    await until_free(engine)
    assert (await load(engine)).generated_tokens_total - before < 1000


async def test_a_client_that_leaves_in_mid_stream(gateway: Gateway, engine: EngineProcess) -> None:
    async with gateway.http.stream("POST", "/v1/completions", json=completion(stream=True, **ENDLESS)) as answer:
        lines = answer.aiter_lines()  # kept: its end would close the stream
        while not (await anext(lines)).startswith("data: "):
            pass
        assert (await load(engine)).running_requests == 1
    await until_free(engine)


async def test_a_client_that_leaves_while_a_whole_answer_is_made(gateway: Gateway, engine: EngineProcess) -> None:
    call = asyncio.create_task(gateway.http.post("/v1/completions", json=completion(**ENDLESS)))
    await until_running(engine)
    call.cancel()
    await until_free(engine)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_prefix_goes_to_the_engine_that_holds_it(
    succ: Path, engine: EngineProcess, tmp_path: Path, version: str
) -> None:
    """The prefix was computed out of the gateway's sight: only the engine's events can tell it."""
    with started_engine(succ, *FLAGS) as other:
        urls = [facade_url(engine), facade_url(other)]
        async with running_smg(version, urls, tmp_path / "smg.log") as gateway:
            for holder, topic in ((engine, " tides"), (other, " bread"), (engine, " chess")):
                prompt = topic * 200
                await warm(holder, succ, prompt)
                before = (await load(holder)).cached_tokens_total
                for tail in range(6):
                    body = completion(prompt=f"{prompt} {tail}")
                    assert (await gateway.http.post("/v1/completions", json=body)).status_code == 200
                assert (await load(holder)).cached_tokens_total - before >= 6 * 192, (version, topic)


async def warm(engine: EngineProcess, folder: Path, prompt: str) -> None:
    """Computes the prompt by the engine's own API, and gives the gateway a moment to hear of it."""
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt).ids
    async with grpc.aio.insecure_channel(engine.address) as channel:
        message = engine_pb2.GenerateRequest(request=engine_pb2.TokenRequest(prompt_token_ids=ids))
        message.request.sampling.max_tokens = 1
        async for _ in engine_pb2_grpc.EngineServiceStub(channel).Generate(message):
            pass
    await asyncio.sleep(0.5)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_request_that_is_quiet_for_150_seconds_survives(
    engine: EngineProcess, tmp_path: Path, version: str
) -> None:
    """Past the gateway's pings, of which a server with the library's own options accepts two only.

    The engine is stopped, and nobody may take it for hung.
    """
    async with running_smg(version, [facade_url(engine)], tmp_path / "smg.log") as gateway:
        os.kill(engine.engine_pid, signal.SIGSTOP)
        started = time.monotonic()
        try:
            call = asyncio.create_task(gateway.http.post("/v1/completions", json=completion(), timeout=200.0))
            await asyncio.wait({call}, timeout=155.0)
            assert not call.done(), (await call).text
        finally:
            os.kill(engine.engine_pid, signal.SIGCONT)
        answer = await call
    assert time.monotonic() - started >= 150
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (200, SCRIPT_S1_TEXT)
