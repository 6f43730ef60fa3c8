"""What is kept from the KV pool for the steps themselves."""

from pathlib import Path

import torch

from engine_service.worker.config import ModelDtype
from engine_service.worker.cuda.profiling import LargestStep, bytes_beside_pool, measure_peak
from engine_service.worker.model_loader import load_model
from tests.fixtures.checkpoints import HIST_VOCAB, write_hist

CPU = torch.device("cpu")


class Meter:
    """Notes whether it was asked around the step, and once."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def begin(self) -> None:
        self.calls.append("begin")

    def peak(self) -> int:
        self.calls.append("peak")
        return 1234


def test_one_step_of_the_largest_size_is_measured(tmp_path: Path) -> None:
    model = load_model(write_hist(tmp_path, tokenizer=False), ModelDtype.AUTO, CPU).paged
    sizes: list[tuple[int, int]] = []

    class Watched:
        layers = model.layers

        def forward(
            self, ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor, context: object
        ) -> torch.Tensor:
            meter.calls.append("step")
            logits = model.forward(ids, positions, rows, context)  # type: ignore[arg-type]
            sizes.append((len(ids), len(logits)))
            return logits

    meter = Meter()
    assert measure_peak(Watched(), CPU, LargestStep(tokens=300, rows=64), meter) == 1234
    assert meter.calls == ["begin", "step", "peak"]
    assert sizes == [(300, 64)]


def test_bytes_beside_the_pool_add_up() -> None:
    nothing = bytes_beside_pool(0, 0, 0, 0, 0)
    assert nothing == 256 * 1024**2
    sampler = 32 * 8 * HIST_VOCAB * 4
    assert bytes_beside_pool(7, HIST_VOCAB, 3, 1000, 50) == nothing + 7 + sampler + 3 * 4 * 1024**2 + 1000 + 50
