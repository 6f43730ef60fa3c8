"""The HTTP endpoint of the real process: its port, its keys, its end."""

import asyncio
import contextlib
import signal
import socket
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fixtures import fake_engine as fe
from tests.fixtures.http_calls import CHAT, COMPLETIONS, body_of, error_of, events
from tests.fixtures.tokenizer_app import default_model, model_info
from tests.fixtures.tokenizer_process import TokenizerProcess, tokenizer_process


@contextlib.asynccontextmanager
async def running(script: fe.Script, *arguments: str, **environment: str) -> Any:
    """A FAKE-ENGINE, the process, and a client of its endpoint."""
    engine = fe.FakeEngine(model_info(default_model()), script)
    await engine.start()
    try:
        async with tokenizer_process("--engine", engine.address, *arguments, environment=environment) as service:
            port = (await service.wait_for_event("listening"))["http_port"]
            await service.wait_for_event("serving")
            limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, limits=limits) as client:
                yield engine, service, client
    finally:
        await engine.stop()


async def test_a_port_in_use_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        async with tokenizer_process("--http-port", port) as service:
            assert await service.wait_exit() == 1
    text = "".join(service.other_lines)
    assert f"cannot listen on 127.0.0.1:{port} for HTTP" in text
    assert "Traceback" not in text


async def test_it_can_be_switched_off() -> None:
    async with tokenizer_process("--no-http") as service:
        assert (await service.wait_for_event("listening"))["http_port"] is None


@pytest.mark.parametrize("content", [None, "plain-secret"])
async def test_keys_that_cannot_be_used_end_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_text(content)
    async with tokenizer_process("--api-key-file", str(file)) as service:
        assert await service.wait_exit() == 1
    text = "".join(service.other_lines)
    assert "file of API keys" in text
    assert "Traceback" not in text
    assert "secret" not in text


async def test_keys_from_the_environment_are_never_logged() -> None:
    async def hello(request: fe.FakeRequest) -> None:
        await request.play([19556], eos=2)

    keys = {"TOKENWIRE_TOKENIZER_API_KEY": "first-secret,second-secret"}
    async with running(hello, **keys) as (_, service, client):
        for key, status in (("first-secret", 200), ("second-secret", 200), ("wrong-secret", 401)):
            answer = await client.post(CHAT, json=body_of(CHAT), headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == status
        service.process.send_signal(signal.SIGTERM)
        assert await service.wait_exit() == 0
        assert "secret" not in str(service.events) + "".join(service.other_lines)


async def test_sigterm_lets_streams_finish_then_ends() -> None:
    release = asyncio.Event()

    async def script(request: fe.FakeRequest) -> None:
        await request.send([19556])
        await release.wait()
        await request.play([905], eos=2)

    async with (
        running(script) as (_, service, client),
        client.stream("POST", CHAT, json=body_of(CHAT, stream=True)) as answer,
    ):
        lines = answer.aiter_lines()
        begin = await anext(lines)
        service.process.send_signal(signal.SIGTERM)
        await service.wait_for_event("draining")
        error_of(await client.get("/ready"), 503)
        refused = await client.post(CHAT, json=body_of(CHAT))
        assert error_of(refused, 503)["code"] == "service_unavailable"
        assert refused.headers["retry-after"]
        release.set()
        found = events("\n".join([begin, *[line async for line in lines]]))
        assert found[-1] == "[DONE]"
        assert await service.wait_exit() == 0
        complaints = [event for event in service.events if event.get("level") in ("error", "critical")]
        assert complaints == []


async def test_a_second_signal_ends_streams_with_an_error() -> None:
    async with (
        running(fe.chain_until_cancelled) as (_, service, client),
        client.stream("POST", CHAT, json=body_of(CHAT, stream=True)) as answer,
    ):
        lines = answer.aiter_lines()
        begin = await anext(lines)
        service.process.send_signal(signal.SIGTERM)
        await service.wait_for_event("draining")
        service.process.send_signal(signal.SIGTERM)
        found = events("\n".join([begin, *[line async for line in lines]]))
        assert found[-1]["error"]["code"] == "service_unavailable"
        assert await service.wait_exit() == 0


async def read_log(service: TokenizerProcess) -> None:
    while await service._next_event() is not None:
        pass


def resident_bytes(service: TokenizerProcess) -> int:
    memory = psutil.Process(service.process.pid).memory_full_info()
    return int(memory.uss)


@pytest.mark.slow
async def test_thousands_of_left_streams_leave_nothing_behind() -> None:
    """B123, B139 over HTTP: no error line, no descriptor, memory flat."""
    async with running(fe.chain_until_cancelled) as (engine, service, client):
        process = psutil.Process(service.process.pid)
        reading = asyncio.create_task(read_log(service))  # a full pipe would stop the service

        async def leave(count: int) -> None:
            for _ in range(count):
                body = body_of(COMPLETIONS, stream=True, prompt=[5])
                async with client.stream("POST", COMPLETIONS, json=body) as answer:
                    await anext(answer.aiter_bytes())

        async def round_of(count: int) -> tuple[int, int]:
            await asyncio.gather(*(leave(count // 20) for _ in range(20)))
            await engine.wait_until(lambda: engine.num_live == 0)
            return resident_bytes(service), process.num_fds()

        await round_of(1000)
        memory, descriptors = await round_of(500)
        later_memory, later_descriptors = await round_of(3000)
        assert later_memory - memory < 3000 * 1024
        assert later_descriptors <= descriptors + 2
        service.process.send_signal(signal.SIGTERM)
        await asyncio.wait_for(reading, 30)
        assert await service.process.wait() == 0
        assert [event for event in service.events if event.get("level") in ("error", "critical")] == []
        assert not any("Traceback" in line for line in service.other_lines)
