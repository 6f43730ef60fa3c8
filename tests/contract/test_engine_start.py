"""Starts of the engine service as a process: those that fail say why, and the front is up before the engine."""

import asyncio
import signal
import socket
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from engine_service.build_engine import build_engine
from engine_service.config import EngineSettings
from engine_service.engine_config import engine_config
from engine_service.loop.mailbox import EngineMailbox, socket_pair
from tests.fixtures.checkpoints import write_hist
from tests.fixtures.engine_process import EngineProcess
from tests.fixtures.process_calls import connect, failure, request


@pytest.fixture(scope="module")
def hist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("checkpoints") / "hist")


async def test_front_is_up_while_the_engine_loads_and_stops_at_once(hist: Path) -> None:
    engine = EngineProcess(f"--model={hist}")
    try:
        await asyncio.to_thread(engine.wait_event, "engine starting")
        async with connect(engine) as (channel, stub):
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
            error = await failure(stub.Generate(request([1], 3)))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "starting" in (error.details() or "")
        engine.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(engine.wait_exit, 5.0) == 0
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (["--model=/nonexistent/model"], 1, ["/nonexistent/model"]),
        (["--model=no-such-model"], 1, ["no-such-model"]),
        (["--step-token-budget=8", "--prefill-chunk-size=9"], 2, ["9", "8"]),
        (["--port=99999"], 2, ["--port"]),
        (["--frobnicate"], 2, ["--frobnicate"]),
    ],
)
def test_starts_that_fail(flags: list[str], status: int, words: list[str]) -> None:
    """B071, B145: one plain line, no traceback, a non-zero status."""
    engine = EngineProcess(*flags)
    try:
        assert engine.wait_exit(60.0) == status
    finally:
        engine.close()
    assert not any("Traceback" in line for line in engine.lines)
    for word in words:
        assert word in engine.lines[-1]


SIZES = [
    ({"kv_cache_memory": 1000}, ["1,000 bytes", "block"]),
    ({"kv_cache_memory": 0}, ["0 bytes", "block"]),
    ({"max_model_len": 5000}, ["5,000", "4,096"]),
    ({"num_blocks": 4, "block_size": 16, "max_model_len": 100}, ["100", "65"]),
    ({"backend": "abacus"}, ["abacus"]),
]


@pytest.mark.parametrize(("changes", "words"), SIZES)
def test_sizes_that_cannot_work_are_refused_with_numbers(
    hist: Path, changes: dict[str, object], words: list[str]
) -> None:
    """B145: known only once the model is loaded; needed and available numbers in one line."""
    settings = EngineSettings.model_validate({"model": str(hist), "device": "cpu", **changes})
    front_end, engine_end = socket_pair()
    with front_end, pytest.raises(ValueError, match=words[0]) as refused:
        build_engine(engine_config(settings), hist, EngineMailbox(engine_end))
    for word in words[1:]:
        assert word in str(refused.value)
    engine_end.close()


def test_length_that_was_left_open_is_lowered_to_the_pool(hist: Path) -> None:
    """B145: visible in the engine's own information."""
    settings = EngineSettings.model_validate({"model": str(hist), "num_blocks": 4, "block_size": 16})
    front_end, engine_end = socket_pair()
    with front_end, engine_end:
        _, ready = build_engine(engine_config(settings), hist, EngineMailbox(engine_end))
    assert (ready.info.max_model_len, ready.info.num_blocks, ready.stats.total_blocks) == (65, 4, 4)


def test_start_that_fails_after_loading_is_one_plain_line(hist: Path) -> None:
    engine = EngineProcess(f"--model={hist}", "--kv-cache-memory=1000")
    try:
        assert engine.wait_exit(90.0) == 1
    finally:
        engine.close()
    assert not any("Traceback" in line for line in engine.lines)
    assert "1,000 bytes" in engine.lines[-1]


@pytest.mark.parametrize("flag", ["--port", "--metrics-port"])
def test_port_in_use_is_an_error(flag: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        engine = EngineProcess("--model=unused", f"{flag}={port}")
        try:
            assert engine.wait_exit(30.0) == 1
        finally:
            engine.close()
    assert str(port) in engine.lines[-1]
    assert "in use" in engine.lines[-1]
