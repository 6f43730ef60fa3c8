"""A real engine process with a quantized checkpoint: what it says of its weights, and where it refuses to start."""

import json
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

from tests.fixtures.engine_process import started_engine
from tests.fixtures.quantized import write_quantized
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc


@pytest.mark.parametrize(
    ("name", "source", "kept"),
    [("awq", "awq, 4 bits, groups of 32", "int4"), ("integers", "int-quantized, 8 bits, one scale a row", "int8")],
)
def test_weights_are_one_event_and_part_of_the_model_information(
    tmp_path: Path, name: str, source: str, kept: str
) -> None:
    write_quantized(tmp_path, name)
    with started_engine(tmp_path, "--num-blocks=16", "--dtype=bfloat16", f"--weight-format={kept}") as engine:
        event = engine.wait_event("weights")
        with grpc.insecure_channel(engine.address) as channel:
            info = engine_pb2_grpc.EngineServiceStub(channel).GetModelInfo(engine_pb2.GetModelInfoRequest(), timeout=10)
    assert (info.weights.source, info.weights.kept) == (source, kept)
    assert (info.weights.error.reference, info.weights.error.positions) == ("float32", 64)
    assert 0.0 < info.weights.error.relative < 0.05
    told = {name: event[name] for name in ("source", "kept", "relative", "largest", "divergence", "same_best")}
    error = info.weights.error
    said = {name: getattr(error, name) for name in ("relative", "largest", "divergence", "same_best")}
    assert told == {"source": info.weights.source, "kept": info.weights.kept, **said}
    # Other tokens than with weights kept otherwise: such engines do not go on with each other's requests.
    assert info.weights_fingerprint.endswith(f"-{kept}")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"quant_method": "fp8"}, "quantization_config.quant_method is 'fp8', which is not supported"),
        ({"zero_point": False}, "quantization_config.zero_point is False, which is not supported; it has to be True"),
    ],
)
def test_what_is_not_served_ends_the_start_with_one_line(tmp_path: Path, change: dict[str, object], said: str) -> None:
    write_quantized(tmp_path, "awq")
    content = json.loads((tmp_path / "config.json").read_text())
    content["quantization_config"] |= change
    (tmp_path / "config.json").write_text(json.dumps(content))
    command = [sys.executable, "-m", "engine_service", "--port=0", "--metrics-port=0", f"--model={tmp_path}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode != 0
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
