"""The check of the CUDA backend, rehearsed on the CPU, with nothing installed that the device's machine lacks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import equality, models
from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.device_tests import DeviceTests
from benchmarks.gpu.equality import Equality
from benchmarks.gpu.report import Report
from engine_service.worker.attention import LayerShape
from engine_service.worker.config import Device, WeightFormat, WorkerConfig
from engine_service.worker.cuda import dense
from engine_service.worker.cuda.backend import serve
from engine_service.worker.cuda.packed_linear import TorchProducts
from engine_service.worker.cuda.packed_matrix import PackedMatrix, unpack_into
from engine_service.worker.ranks import RankPool

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[3]
ABSENT = ("structlog", "pydantic", "pydantic_settings", "grpc_tools", "grpc_health", "llguidance", "gguf", "starlette")
PROGRAM = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError("No module named " + repr(name), name=name)
sys.meta_path.insert(0, Absent())
from benchmarks.gpu_check import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=170)


def test_the_rehearsal_holds_and_reports_every_part(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "check.json"
    done = run("--device", "cpu", "--tiny", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert found["holds"] is True
    assert found["attention"] == "dense"
    assert {part["attention"] for part in found["equalities"]} == {"dense, graphs", "dense, no graphs"}
    assert all(part["positions"] > 40 and part["others"] == 0 for part in found["equalities"])
    timings = {(row["what"], row["tokens"], row["graphs"], row["overlap"]) for row in found["timings"]}
    decodes = {("decode", batch, graphs, overlap) for batch in (1, 3) for graphs in (1, 0) for overlap in (1, 0)}
    packed = {(kept, batch, True, overlap) for kept in ("int8", "int4") for batch in (1, 3) for overlap in (1, 0)}
    assert timings == decodes | packed | {("prefill", 32, False, False), ("prefill", 64, False, False)}
    checked = [part["model"] for part in found["equalities"]]
    assert checked == [*["tiny random"] * 2, "tiny random, int8 by torch", "tiny random, int4 by torch"]
    floors = {row["what"]: row["floor"] for row in found["timings"] if row["tokens"] == 1}
    assert floors["int4"] < floors["int8"] < floors["decode"]
    assert all(row["seconds"] > 0 and row["floor"] > 0 for row in found["timings"])
    assert "HOLDS after" in done.stdout


def test_without_a_device_the_check_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        gpu_check.main([])
    assert exit_.value.code == 2
    assert "this torch finds no CUDA device; --device cpu --tiny rehearses the check" in capsys.readouterr().err


def test_a_wrong_kernel_is_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention that forgets the oldest token."""
    model = models.random_llama(CPU, torch.float32, tiny=True, compiled=False)
    config = WorkerConfig(model_folder=Path(), device=Device.CPU, max_num_requests=8, step_token_budget=512)
    pool = RankPool(16, 64, 64)

    def check() -> Equality:
        return equality.check_equality(model, serve(model.model, model.facts, config, CPU), config, pool, "dense")

    assert check().holds
    attend = dense._attend

    def forgetful(query: torch.Tensor, *rest: object) -> torch.Tensor:
        *others, shape = rest
        assert isinstance(shape, LayerShape)
        return attend(query, *others, LayerShape(4, 2, 16, 16, shape.scale, sliding_window=4))  # type: ignore[arg-type]

    loaded = serve(model.model, model.facts, config, CPU)
    monkeypatch.setattr(dense, "_attend", forgetful)
    found = equality.check_equality(model, loaded, config, pool, "dense")
    assert not found.holds
    assert found.largest_error > 10 * found.tolerance


def test_wrong_packed_weights_are_unequal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights a little larger than the codes mean."""
    model = models.random_llama(CPU, torch.float32, tiny=True, compiled=False)
    config = WorkerConfig(model_folder=Path(), device=Device.CPU, max_num_requests=8, step_token_budget=512)
    packed = models.packed(model, WeightFormat.INT4, CPU, compiled=False)
    loaded = serve(packed.model, packed.facts, config, CPU)
    assert equality.check_equality(packed, loaded, config, RankPool(16, 64, 64), "dense").holds

    def larger(products: TorchProducts, matrix: PackedMatrix, out: torch.Tensor) -> None:
        unpack_into(matrix, out)
        out *= 1.05

    monkeypatch.setattr(TorchProducts, "unpack", larger)
    assert not equality.check_equality(packed, loaded, config, RankPool(16, 64, 64), "dense").holds


@pytest.mark.parametrize(
    ("error", "others", "tests", "holds"),
    [
        (0.02, 0, None, True),
        (0.04, 0, None, False),
        (float("nan"), 0, None, False),
        (0.0, 1, None, False),
        (0.0, 0, DeviceTests(False, ""), False),
        (0.0, 0, DeviceTests(True, ""), True),
    ],
)
def test_what_fails_the_check(error: float, others: int, tests: DeviceTests | None, holds: bool) -> None:
    found = Equality("m", "a", 10, error, 0.03, others)
    report = Report("d", "2", "a", (), Ceilings(1.0, 1.0), [Equality("m", "a", 1, 0.0, 0.03, 0), found], tests, ())
    assert report.holds is holds
    assert any("NOT EQUAL" in line or "FAILED" in line for line in report.lines()) is not holds
