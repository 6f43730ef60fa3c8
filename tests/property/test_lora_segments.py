"""Rows of a step grouped by adapter: every row once, and by the kernels the same numbers as row by row."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.worker.config import WeightFormat
from engine_service.worker.kernels.build import Unavailable, default_folder, prepare_best_library
from engine_service.worker.kernels.cpu_model import CpuModel, PoolSize
from engine_service.worker.kernels.decoder_shape import DecoderShape
from engine_service.worker.kernels.fused_adapter import fuse_adapter, linear_shapes
from engine_service.worker.kernels.library import KernelLibrary, ThreadTeam
from engine_service.worker.kernels.step_batch import StepBatch
from engine_service.worker.lora.adapter import Adapter, LowRank
from engine_service.worker.lora.linear_hooks import segments

NUMBERS = st.lists(st.integers(0, 5), min_size=1, max_size=60)
SHAPE = DecoderShape(1, 32, 2, 1, 16, 64, 40, 1e-5, (None,), tied_head=True, head_norms=False)
POSITIONS = 64


@given(NUMBERS)
def test_each_row_with_an_adapter_is_in_its_segment_once(numbers: list[int]) -> None:
    found = list(segments(np.array(numbers, dtype=np.int32), torch.device("cpu")))
    rows = {number: group.tolist() for number, group in found}
    assert len(rows) == len(found)
    assert rows == {number: [row for row, its in enumerate(numbers) if its == number] for number in set(numbers) - {0}}


def _weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {f"{name}.weight": (size.outputs, size.inputs) for name, size in linear_shapes(SHAPE).items()}
    shapes["model.embed_tokens.weight"] = (SHAPE.vocabulary, SHAPE.hidden)
    found = {name: torch.randn(size, generator=generator) for name, size in shapes.items()}
    ones = ("input_layernorm", "post_attention_layernorm")
    found |= {f"model.layers.0.{name}.weight": torch.ones(SHAPE.hidden) for name in ones}
    return {**found, "model.norm.weight": torch.ones(SHAPE.hidden)}


def _adapter(seed: int) -> Adapter:
    generator = torch.Generator().manual_seed(seed)
    chosen = [item for place, item in enumerate(linear_shapes(SHAPE).items()) if (place + seed) % 3]
    rank = 1 + 7 * seed
    updates = {
        name: LowRank(
            torch.randn(rank, size.inputs, generator=generator), torch.randn(size.outputs, rank, generator=generator)
        )
        for name, size in chosen
    }
    return Adapter(rank, 0.25, updates, str(seed))


KINDS = [(torch.float32, WeightFormat.PLAIN), (torch.bfloat16, WeightFormat.INT4), (torch.bfloat16, WeightFormat.INT8)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind[1].value)
def model(request: pytest.FixtureRequest) -> CpuModel:
    library = prepare_best_library(default_folder(), print)
    assert not isinstance(library, Unavailable)
    rotary = torch.ones(POSITIONS, 8), torch.zeros(POSITIONS, 8)
    team = ThreadTeam(KernelLibrary(library), 2)
    dtype, weight_format = request.param
    model = CpuModel(_weights(), SHAPE, rotary, PoolSize(64, 16), dtype, team, weight_format)
    for number in range(1, 5):  # a row may name one that is not there: it is as without
        model.install_adapter(number, fuse_adapter(_adapter(number), SHAPE, dtype))
    return model


def _logits(model: CpuModel, tokens: list[int], numbers: list[int]) -> torch.Tensor:
    """Each token is a request of its own, at its own block."""
    count = len(tokens)
    batch = StepBatch(
        input_ids=torch.tensor(tokens),
        positions=torch.zeros(count, dtype=torch.int64),
        slot_mapping=torch.arange(count) * 16,
        block_tables=torch.arange(count, dtype=torch.int32).view(count, 1),
        query_start=torch.arange(count + 1, dtype=torch.int32),
        seq_lens=torch.ones(count, dtype=torch.int32),
        sample_rows=torch.arange(count),
        adapters=np.array(numbers, dtype=np.int32) if any(numbers) else None,
    )
    return model.step(batch).logits.clone()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 39), st.integers(0, 5)), min_size=1, max_size=60))
def test_a_row_has_the_same_bits_in_any_company(model: CpuModel, rows: list[tuple[int, int]]) -> None:
    tokens, numbers = [token for token, _ in rows], [number for _, number in rows]
    together = _logits(model, tokens, numbers)
    alone = torch.cat([_logits(model, [token], [number]) for token, number in rows])
    assert torch.equal(together, alone)
