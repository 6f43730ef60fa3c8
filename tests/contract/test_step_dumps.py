"""Recorded steps by a call and by the command; drain by the command: real services, an independent count."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.loop.step_recorder import StepRecorder
from engine_service.simulated.step_model import StepModel
from tests.fixtures.checkpoints import write_hist
from tests.fixtures.engine_process import EngineProcess, started_engine
from tests.fixtures.scripted_engine import scripted_service
from tests.fixtures.trace_format import check_trace, chunks, counters, track
from tokenwire.common.v1 import sampling_pb2
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc


def request(name: str, prompt: list[int], max_tokens: int) -> engine_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    token_request = engine_pb2.TokenRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling)
    return engine_pb2.GenerateRequest(request=token_request)


async def read(call: Any) -> Any:
    return json.loads(b"".join([part.data async for part in call]))


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    return caught.value.code(), str(caught.value.details())


async def drained(stub: Any, *requests: engine_pb2.GenerateRequest) -> list[int]:
    """Tokens of each."""

    async def tokens(message: engine_pb2.GenerateRequest) -> int:
        return sum([len(answer.token_ids) async for answer in stub.Generate(message)])

    return list(await asyncio.gather(*(tokens(message) for message in requests)))


@pytest.mark.parametrize("overlap", [False, True])
async def test_the_trace_counts_what_the_client_counts(overlap: bool) -> None:
    async with scripted_service(recorder=StepRecorder(500), overlap=overlap, prefix_cache=False) as service:
        told = await drained(service.stub, request("a", [5] * 50, 7), request("b", [6] * 3, 20))
        trace = await read(service.stub.DumpSteps(engine_pb2.DumpStepsRequest()))
    check_trace(trace)
    tokens = {("a", "prefill"): 50, ("a", "decode"): told[0] - 1, ("b", "prefill"): 3, ("b", "decode"): told[1] - 1}
    counted = dict.fromkeys(tokens, 0)
    for event in chunks(trace):
        counted[event["args"]["request"], event["name"]] += event["args"]["tokens"]
    assert counted == tokens
    assert counters(trace, "KV blocks")[-1]["used"] == 0


async def test_a_part_of_the_steps_and_none(tmp_path: Path) -> None:
    async with scripted_service(recorder=StepRecorder(500)) as service:
        none = await read(service.stub.DumpSteps(engine_pb2.DumpStepsRequest()))
        check_trace(none)
        assert chunks(none) == []
        await drained(service.stub, request("a", [5], 9))
        three = await read(service.stub.DumpSteps(engine_pb2.DumpStepsRequest(steps=3)))
        check_trace(three)
        assert len(track(three, "engine", "worker")) == 3
        wrong = await code_of(service.stub.DumpSteps(engine_pb2.DumpStepsRequest(steps=0)))
        assert wrong == (grpc.StatusCode.INVALID_ARGUMENT, "steps is 0, at least 1 is needed")


async def test_without_the_flag_nothing_is_told() -> None:
    async with scripted_service() as service:
        code, text = await code_of(service.stub.DumpSteps(engine_pb2.DumpStepsRequest()))
    assert (code, "--allow-step-dump-rpc" in text) == (grpc.StatusCode.PERMISSION_DENIED, True)


@pytest.mark.parametrize("engine_goes", [False, True])
async def test_one_caller_at_a_time_and_the_engine_may_go(engine_goes: bool) -> None:
    """The loop waits in a step: the first caller waits for it, the second is told to come again."""
    async with scripted_service(recorder=StepRecorder(9), gated=True) as service:
        running = service.stub.Generate(request("a", [5], 3))
        while not service.worker.plans:  # noqa: ASYNC110 (the engine's thread)
            await asyncio.sleep(0.01)
        dump = service.stub.DumpSteps(engine_pb2.DumpStepsRequest())
        first = asyncio.create_task(code_of(dump) if engine_goes else read(dump))
        while not service.handle.step_dumps.is_busy:  # noqa: ASYNC110 (the server's end of the call)
            await asyncio.sleep(0.01)
        code, _ = await code_of(service.stub.DumpSteps(engine_pb2.DumpStepsRequest()))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        if engine_goes:
            service.handle.detach(Refusal(RefusalCode.ENGINE_GONE, "the engine is gone"))
            assert await first == (grpc.StatusCode.UNAVAILABLE, "the engine is gone")
        else:
            service.worker.open_gate()
            check_trace(await first)
        running.cancel()


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    full = [sys.executable, "-m", "tokenwire_client.cli", *arguments]
    return subprocess.run(full, capture_output=True, text=True, timeout=60, check=False, env=dict(os.environ))


@pytest.fixture
def engine(tmp_path: Path) -> Any:
    folder = write_hist(tmp_path / "hist")
    StepModel(0.02, 0.0, 0.0, 0.0, 0.0).save(tmp_path / "step-model.json", {})
    flags = (f"--simulate={tmp_path / 'step-model.json'}", "--allow-step-dump-rpc", "--allow-drain-rpc")
    with started_engine(folder, *flags) as process:
        yield process


def test_the_commands(engine: EngineProcess, tmp_path: Path) -> None:
    """`tokenwire steps` writes the file whole or not at all; `tokenwire drain` ends the service."""
    out = tmp_path / "steps.json"
    with grpc.insecure_channel(engine.address) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        list(stub.Generate(request("chat-1", [3] * 40, 12), timeout=30))
        done = command("steps", "--engine", engine.address, "--out", str(out))
        assert (done.returncode, done.stderr) == (0, "")
        trace = json.loads(out.read_text())
        check_trace(trace)
        assert {event["args"]["request"] for event in chunks(trace)} == {"chat-1"}
        assert sum(event["args"]["tokens"] for event in chunks(trace)) == 40 + 11
        steps = track(trace, "engine", "worker")
        assert all(step["dur"] >= 19_000 for step in steps if step["args"]["tokens"])  # what the step model says
        missing = command("steps", "--engine", engine.address, "--out", str(tmp_path / "no" / "steps.json"))
        assert (missing.returncode, "cannot write" in missing.stderr) == (1, True)
        running = stub.Generate(request("chat-2", [3], 3000), timeout=120)
        next(running)
        draining = command("drain", "--engine", engine.address, "--json")
        assert json.loads(draining.stdout) == {"engine": engine.address, "live_requests": 1}
        running.cancel()
    assert engine.wait_exit(20) == 0
    gone = command("drain", "--engine", engine.address, "--timeout", "2")
    assert (gone.returncode, gone.stdout) == (1, "")
