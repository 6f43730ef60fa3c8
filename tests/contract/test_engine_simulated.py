"""The engine service with its simulated worker, as processes over sockets: light, deterministic, honest."""

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from engine_service.simulated.step_model import StepModel
from engine_service.simulated.tokens import token_at
from service_runtime.grpc_server import channel_options
from tests.fixtures.checkpoints import write_hist
from tests.fixtures.engine_process import EngineProcess, started_engine
from tokenwire.common.v1 import outcome_pb2, sampling_pb2
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("simulated")
    StepModel(0.001, 0.0001, 0.00001, 0.0, 0.0).save(folder / "model.json", {})
    with started_engine(write_hist(folder / "hist"), f"--simulate={folder / 'model.json'}") as engine:
        yield engine


def generate(engine: EngineProcess, **sampling: object) -> list[engine_pb2.GenerateResponse]:
    request = engine_pb2.TokenRequest(
        prompt_token_ids=[3, 4, 5],
        sampling=sampling_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
    )
    with grpc.insecure_channel(engine.address, options=channel_options()) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        return list(stub.Generate(engine_pb2.GenerateRequest(request=request), timeout=30))


def test_tokens_are_those_of_seed_and_position(engine: EngineProcess) -> None:
    with grpc.insecure_channel(engine.address) as channel:
        info = engine_pb2_grpc.EngineServiceStub(channel).GetModelInfo(engine_pb2.GetModelInfoRequest(), timeout=10)
    answers = generate(engine, max_tokens=12, seed=9)
    tokens = [token for answer in answers for token in answer.token_ids]
    assert tokens == [token_at(9, 3 + place, info.vocab_size, frozenset(info.eos_token_ids)) for place in range(12)]
    assert answers[-1].finish.reason == outcome_pb2.FINISH_REASON_LENGTH


def test_structured_output_is_refused(engine: EngineProcess) -> None:
    structured = sampling_pb2.StructuredOutput(regex="a+")
    with pytest.raises(grpc.RpcError) as caught:
        generate(engine, max_tokens=3, structured_output=structured)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_neither_process_holds_torch(engine: EngineProcess) -> None:
    for pid in (engine.pid, engine.engine_pid):
        assert not re.search("torch|transformers", Path(f"/proc/{pid}/maps").read_text())


def test_a_bad_step_model_ends_the_start(tmp_path: Path) -> None:
    (tmp_path / "model.json").write_text("{}")
    engine = EngineProcess(f"--model={write_hist(tmp_path / 'hist')}", f"--simulate={tmp_path / 'model.json'}")
    try:
        assert engine.wait_exit(60) == 1
        assert any("the step model is not JSON" in line for line in engine.lines)
    finally:
        engine.close()
