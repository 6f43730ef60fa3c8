"""An engine of two ranks as real processes: its text, its deaths, and that it leaves nothing behind."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from engine_service.worker.build import build_worker
from engine_service.worker.config import Device, WeightFormat, WorkerConfig
from tests.fixtures.checkpoints import reference_greedy, write_hist, write_random_model
from tests.fixtures.engine_process import EngineProcess, started_engine
from tests.fixtures.engine_run import start_ranks
from tests.fixtures.process_calls import (
    collect,
    connect,
    failure,
    request,
)
from tokenwire.engine.v1 import engine_pb2

FLAGS = (
    "--tensor-parallel-size=2",
    "--device=cpu",
    "--block-size=16",
    "--num-blocks=64",
    "--step-token-budget=64",
    "--max-num-requests=16",
)


@pytest.fixture(scope="module")
def hist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("checkpoints") / "hist")


def processes_of(engine: EngineProcess) -> list[int]:
    return [engine.pid, engine.engine_pid, *engine.wait_event("ranks started")["pids"]]


def check_gone(pids: Sequence[int]) -> None:
    """The system ends them a moment after their parent."""
    deadline = time.monotonic() + 10.0
    for pid in pids:
        while Path(f"/proc/{pid}").exists() and ") Z" not in Path(f"/proc/{pid}/stat").read_text():
            assert time.monotonic() < deadline, f"process {pid} is left"
            time.sleep(0.02)


async def test_killed_rank_in_mid_stream_ends_the_service(hist: Path) -> None:
    """Streams end with UNAVAILABLE, for failover, and the service with 1."""
    with started_engine(hist, *FLAGS) as engine:
        pids = processes_of(engine)
        async with connect(engine) as (_, stub):
            calls = [stub.Generate(request([i + 1], 900)) for i in range(4)]
            for call in calls:
                await call.read()
            os.kill(pids[-1], signal.SIGKILL)
            errors = await asyncio.gather(*(failure(call) for call in calls))
        assert {error.code() for error in errors} == {grpc.StatusCode.UNAVAILABLE}
        assert await asyncio.to_thread(engine.wait_exit, 10.0) == 1
        assert "the engine failed: tensor parallel rank 1 ended with status -9" in engine.lines[-1]
        check_gone(pids)


async def test_sigterm_ends_all_ranks(hist: Path) -> None:
    """Running work finishes first, and its text is transformers' own. With the overlapped loop."""
    with started_engine(hist, *FLAGS, "--overlap") as engine:
        pids = processes_of(engine)
        async with connect(engine) as (_, stub):
            running = stub.Generate(request([1], 100))
            first = await running.read()
            assert isinstance(first, engine_pb2.GenerateResponse)
            engine.process.send_signal(signal.SIGTERM)
            tokens, finish = await collect(running)
        assert [*first.token_ids, *tokens] == reference_greedy(hist, [1], 100)
        assert finish.usage.completion_tokens == 100
        assert await asyncio.to_thread(engine.wait_exit, 10.0) == 0
        check_gone(pids)
    assert not any("Traceback" in line or '"level": "error"' in line for line in engine.lines)


@pytest.mark.slow
def test_rank_that_dies_while_nothing_runs_ends_the_service(hist: Path) -> None:
    with started_engine(hist, *FLAGS) as engine:
        pids = processes_of(engine)
        os.kill(pids[-1], signal.SIGKILL)
        assert engine.wait_exit(10.0) == 1
        assert engine.wait_event("rank lost")["reason"] == "tensor parallel rank 1 ended with status -9"
        check_gone(pids)


@pytest.mark.slow
async def test_rank_that_hangs_ends_the_service(hist: Path) -> None:
    """The watch over steps sees it, as any step that hangs."""
    with started_engine(hist, *FLAGS, "--hung-step-timeout=5") as engine:
        pids = processes_of(engine)
        async with connect(engine) as (_, stub):
            call = stub.Generate(request([1], 900))
            await call.read()
            os.kill(pids[-1], signal.SIGSTOP)
            assert (await failure(call)).code() is grpc.StatusCode.UNAVAILABLE
        assert await asyncio.to_thread(engine.wait_exit, 10.0) == 1
        check_gone(pids)


REFUSED = [
    ({"tensor_parallel_size": 3}, ["3", "4 attention heads"]),
    ({"tensor_parallel_size": 4}, ["4", "2 key-value heads"]),
    ({"tensor_parallel_size": 2, "backend": "cpu"}, ["'cpu'", "2"]),
    ({"tensor_parallel_size": 2, "device": Device.CUDA}, ["2 CUDA devices", "0"]),
    ({"tensor_parallel_size": 2, "weight_format": WeightFormat.INT4}, ["int4"]),
    ({"tensor_parallel_size": 2, "weight_format": WeightFormat.INT8}, ["int8"]),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_what_cannot_be_split_is_refused_with_numbers(hist: Path, changes: dict[str, object], words: list[str]) -> None:
    """Before any process is started."""
    config = WorkerConfig(model_folder=hist, **changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=words[0]) as refused:
        start_ranks(config)
    for word in words:
        assert word in str(refused.value)


def test_model_without_a_plan_is_refused(tmp_path: Path) -> None:
    import transformers as tf

    config = tf.GPT2Config(vocab_size=64, n_embd=16, n_layer=1, n_head=4, n_positions=64)
    folder = write_random_model(tmp_path, tf.GPT2LMHeadModel, config)
    with pytest.raises(ValueError, match="no plan to split models of type gpt2"):
        start_ranks(WorkerConfig(model_folder=folder, tensor_parallel_size=2))


@pytest.mark.slow
def test_start_that_fails_after_the_ranks_came_leaves_none(hist: Path) -> None:
    config = WorkerConfig(model_folder=hist, tensor_parallel_size=2, threads=1, kv_cache_memory=1000)
    ranks = start_ranks(config)
    assert ranks is not None
    with pytest.raises(ValueError, match="1,000 bytes"):
        build_worker(config, ranks)
    check_gone(ranks.pids)
