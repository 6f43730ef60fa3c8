"""Decodes by recorded graphs: what a step finds in the fixed tensors, and what stale ones would do to it."""

import random
from dataclasses import dataclass

import pytest
import torch

from engine_service.worker.attention import BatchLayout
from engine_service.worker.cuda.decode_graphs import DecodeGraphs
from engine_service.worker.cuda.graph_capture import RerunRecorder
from engine_service.worker.cuda.static_step import StaticStep
from engine_service.worker.input_batch import StepInput

CPU = torch.device("cpu")
BLOCK, SPARE, ROWS, WIDTH = 4, 9, 8, 5
SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Row:
    token: int
    seq_len: int
    blocks: tuple[int, ...]


def step_of(rows: list[Row], sampling: list[int] | None = None) -> StepInput:
    width = max(len(row.blocks) for row in rows)
    layout = BatchLayout(
        slot_mapping=torch.tensor([slot_of(row) for row in rows]),
        query_start=torch.arange(len(rows) + 1, dtype=torch.int32),
        seq_lens=torch.tensor([row.seq_len for row in rows], dtype=torch.int32),
        block_tables=torch.tensor([[*row.blocks, *[7] * (width - len(row.blocks))] for row in rows], dtype=torch.int32),
        query_lens_list=[1] * len(rows),
        seq_lens_list=[row.seq_len for row in rows],
    )
    return StepInput(
        layout=layout,
        input_ids=torch.tensor([row.token for row in rows]),
        positions=torch.tensor([row.seq_len - 1 for row in rows]),
        sample_rows=torch.tensor(list(range(len(rows))) if sampling is None else sampling),
        token_places=torch.zeros(0, dtype=torch.int64),
        sampling=None,  # type: ignore[arg-type]
        request_ids=(),
    )


def slot_of(row: Row) -> int:
    position = row.seq_len - 1
    return row.blocks[position // BLOCK] * BLOCK + position % BLOCK


class Model:
    """Its logits of a row are all that the row may depend on; it remembers where it wrote."""

    def __init__(self, static: StaticStep) -> None:
        self._static = static
        self.written: list[int] = []

    def __call__(self, size: int) -> tuple[torch.Tensor, ...]:
        ids, positions, rows = self._static.inputs(size)
        layout = self._static.layout(size)
        assert rows.tolist() == list(range(size))
        assert layout.query_start.tolist() == list(range(size + 1))
        self.written = layout.slot_mapping.tolist()
        used = torch.arange(WIDTH) < (layout.seq_lens.unsqueeze(1) + BLOCK - 1) // BLOCK
        blocks = (layout.block_tables.long() * used + 1) * torch.tensor([1, 10, 100, 1000, 10_000])
        logits = torch.stack([ids, positions, layout.seq_lens.long(), layout.slot_mapping, blocks.sum(1)], 1).double()
        return logits, ids.clone()


def expected_of(row: Row) -> list[float]:
    blocks = [*row.blocks[: -(-row.seq_len // BLOCK)]] + [0] * WIDTH
    code = sum((block + 1) * 10**place for place, block in enumerate(blocks[:WIDTH]))
    return [row.token, row.seq_len - 1, row.seq_len, slot_of(row), code]


def graphs_of() -> tuple[DecodeGraphs, Model]:
    static = StaticStep(ROWS, WIDTH, BLOCK, SPARE, CPU)
    model = Model(static)
    return DecodeGraphs(SIZES, static, model, RerunRecorder()), model


def test_every_step_of_a_random_walk_is_as_if_its_buffers_were_fresh() -> None:
    draw = random.Random(0)
    graphs, model = graphs_of()
    for _ in range(200):
        rows = [
            Row(draw.randrange(100), length, tuple(draw.sample(range(8), -(-length // BLOCK))))
            for length in (draw.randint(1, WIDTH * BLOCK) for _ in range(draw.randint(1, ROWS)))
        ]
        output = graphs.run(step_of(rows))
        assert output is not None
        assert output.logits is not None
        assert output.best is not None
        assert output.logits.tolist() == [expected_of(row) for row in rows]
        assert output.best.tolist() == [row.token for row in rows]
        assert {slot // BLOCK for slot in model.written[len(rows) :]} <= {SPARE}, "padding writes into its own block"
        assert len(model.written) == next(size for size in SIZES if size >= len(rows))


def test_only_the_rows_that_sample_give_logits() -> None:
    graphs, _ = graphs_of()
    rows = [Row(5, 3, (0,)), Row(6, 2, (1,)), Row(7, 1, (2,))]
    output = graphs.run(step_of(rows, sampling=[0, 2]))
    assert output is not None
    assert output.best is not None
    assert output.best.tolist() == [5, 7]


def test_a_graph_takes_nothing_but_decodes_that_fit() -> None:
    graphs, _ = graphs_of()
    row = Row(1, 1, (0,))
    assert graphs.run(step_of([row] * (ROWS + 1))) is None
    step = step_of([row, row])
    longer = StepInput(
        step.layout,
        torch.zeros(3, dtype=torch.int64),
        torch.zeros(3, dtype=torch.int64),
        *[None] * 3,
        (),  # type: ignore[arg-type]
    )
    assert graphs.run(longer) is None


def test_the_largest_graph_is_recorded_first() -> None:
    order: list[int] = []
    static = StaticStep(ROWS, WIDTH, BLOCK, SPARE, CPU)

    def decode(size: int) -> tuple[torch.Tensor, ...]:
        order.append(size)
        return torch.zeros(size, 2), torch.zeros(size, dtype=torch.int64)

    DecodeGraphs(SIZES, static, decode, RerunRecorder())
    assert order == [8, 4, 2, 1]


def test_a_rehearsed_graph_gives_the_same_memory_again() -> None:
    source = torch.ones(3)
    again = RerunRecorder().record(lambda: (source * 2,))
    first = again()[0]
    source.fill_(4.0)
    assert again()[0].data_ptr() == first.data_ptr()
    assert first.tolist() == [8.0] * 3


@pytest.mark.parametrize("count", [1, 3, 8])
def test_recording_harms_no_block_of_the_scheduler(count: int) -> None:
    """What is recorded writes where padding does."""
    _, model = graphs_of()
    assert {slot // BLOCK for slot in model.written[:count]} == {SPARE}
