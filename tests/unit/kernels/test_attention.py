"""Paged attention of every variant against plain torch, over ragged batches, windows and head shapes."""

from dataclasses import dataclass

import pytest
import torch

from engine_service.worker.kernels.cpu_model import PoolSize
from engine_service.worker.kernels.library import ThreadTeam
from engine_service.worker.kernels.paged_attention import HeadShape, PagedAttention
from engine_service.worker.kernels.step_batch import StepBatch, batch_struct
from tests.unit.kernels.batches import Request, Requests


@dataclass(frozen=True, slots=True)
class Data:
    """Query, key and value of one request's tokens: [tokens, heads, size]."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def _data(shape: HeadShape, tokens: int, dtype: torch.dtype, seed: int) -> Data:
    generator = torch.Generator().manual_seed(seed)
    sizes = {"query": shape.query_heads, "key": shape.kv_heads, "value": shape.kv_heads}
    made = {n: torch.randn(tokens, h, shape.head_size, generator=generator).to(dtype) for n, h in sizes.items()}
    return Data(**made)


def _reference(shape: HeadShape, data: Data, window: int | None) -> torch.Tensor:
    """All tokens of one request at once, in double."""
    groups = shape.query_heads // shape.kv_heads
    query = data.query.double()
    key = data.key.double().repeat_interleave(groups, dim=1)
    value = data.value.double().repeat_interleave(groups, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * shape.scale
    distance = torch.arange(len(query))[:, None] - torch.arange(len(query))[None, :]
    hidden = (distance < 0) | (distance >= window if window else False)
    weights = scores.masked_fill(hidden, -float("inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


class Runner:
    """Feeds chunks of several requests and collects what attention gives for each token."""

    def __init__(
        self, shape: HeadShape, team: ThreadTeam, dtype: torch.dtype, window: int | None, block_size: int = 16
    ) -> None:
        self._attention = PagedAttention(shape, 2, PoolSize(1024 // block_size, block_size), dtype, team)
        self._requests = Requests(1024 // block_size, block_size)
        self._window = window

    def add(self, data: Data) -> Request:
        return self._requests.add([0] * len(data.query), room=0)

    def run(self, chunks: list[tuple[Request, Data, int]]) -> list[torch.Tensor]:
        """The next `n` tokens of each request."""
        starts = [request.computed for request, _, _ in chunks]
        batch = self._requests.batch([(request, count) for request, _, count in chunks])
        parts = [(data, start, start + n) for start, (_, data, n) in zip(starts, chunks, strict=True)]
        query = torch.cat([data.query[a:b] for data, a, b in parts])
        key = torch.cat([data.key[a:b] for data, a, b in parts])
        value = torch.cat([data.value[a:b] for data, a, b in parts])
        out = self.attend(batch, query, key, value)
        return list(out.split([n for _, _, n in chunks]))

    def attend(self, batch: StepBatch, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        view = batch_struct(batch.slot_mapping, batch.block_tables, batch.query_start, batch.seq_lens)
        self._attention.write(1, view, key, value)
        return self._attention.attend(1, view, query, self._window)

    def whole(self, data: Data, chunk: int) -> torch.Tensor:
        """One request alone, in chunks of `chunk` tokens."""
        request, parts = self.add(data), []
        while request.computed < len(data.query):
            count = min(chunk, len(data.query) - request.computed)
            parts += self.run([(request, data, count)])
        return torch.cat(parts)


_DTYPES = [torch.float32, torch.bfloat16]
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
_SHAPES = [
    HeadShape(9, 3, 64, 0.125),
    HeadShape(4, 4, 16, 0.25),
    HeadShape(8, 1, 32, 0.2),
    HeadShape(6, 2, 80, 0.1),
    HeadShape(2, 2, 10, 0.3),
    HeadShape(20, 1, 48, 0.15),
]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 20, 200])
@pytest.mark.parametrize("shape", _SHAPES, ids=lambda s: f"{s.query_heads}-{s.kv_heads}-{s.head_size}")
def test_ragged_batch(team: ThreadTeam, shape: HeadShape, window: int | None, dtype: torch.dtype) -> None:
    """Three requests: a prefill, a decode and a chunk with context, in one batch."""
    runner = Runner(shape, team, dtype, window)
    data = [_data(shape, tokens, dtype, seed) for seed, tokens in enumerate([37, 131, 150])]
    requests = [runner.add(each) for each in data]
    first = runner.run([(requests[1], data[1], 130), (requests[2], data[2], 61)])
    second = runner.run([(requests[1], data[1], 1), (requests[0], data[0], 37), (requests[2], data[2], 89)])
    got = [second[1], torch.cat([first[0], second[0]]), torch.cat([first[1], second[2]])]
    for each, out in zip(data, got, strict=True):
        error = (out.double() - _reference(shape, each, window)).abs().max()
        assert error < _TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 50])
def test_chunks_do_not_change_bits(team: ThreadTeam, window: int | None, dtype: torch.dtype) -> None:
    shape = _SHAPES[0]
    runner = Runner(shape, team, dtype, window)
    data = _data(shape, 150, dtype, seed=5)
    whole = runner.whole(data, 150)
    for chunk in [1, 7, 16, 64, 149]:
        assert torch.equal(Runner(shape, team, dtype, window).whole(data, chunk), whole), chunk


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [32, 64, 256])
def test_block_size_does_not_change_bits(team: ThreadTeam, block_size: int, dtype: torch.dtype) -> None:
    shape = _SHAPES[1]
    data = _data(shape, 100, dtype, seed=6)
    expected = Runner(shape, team, dtype, None).whole(data, 30)
    assert torch.equal(Runner(shape, team, dtype, None, block_size).whole(data, 30), expected)


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_leftovers_of_an_earlier_owner_do_not_leak(team: ThreadTeam, dtype: torch.dtype) -> None:
    """A pool full of NaN, as a failed request leaves it, changes nothing for the next one."""
    shape = _SHAPES[0]
    data = _data(shape, 19, dtype, seed=7)
    expected = Runner(shape, team, dtype, None).whole(data, 5)
    runner = Runner(shape, team, dtype, None)
    poison = _data(shape, 1024, dtype, seed=8)
    runner.whole(Data(poison.query, poison.key * float("nan"), poison.value * float("nan")), 1024)
    runner._requests = Requests(64)
    assert torch.equal(runner.whole(data, 5), expected)


def test_a_request_that_is_not_finite_says_so_and_spares_the_others(team: ThreadTeam) -> None:
    shape = _SHAPES[0]
    runner = Runner(shape, team, torch.float32, None)
    good, bad = (_data(shape, 40, torch.float32, seed) for seed in (1, 2))
    bad.key[3, 1, 5] = float("nan")
    requests = [runner.add(good), runner.add(bad)]
    got = runner.run([(requests[0], good, 40), (requests[1], bad, 40)])
    assert (got[0].double() - _reference(shape, good, None)).abs().max() < 2e-6
    assert got[1][3:, 3:6].isnan().all()


def test_strided_inputs(team: ThreadTeam) -> None:
    """Key, value and query may be slices of one fused projection."""
    shape = _SHAPES[0]
    data = _data(shape, 33, torch.float32, seed=9)
    query, key, value = torch.cat([data.query, data.key, data.value], dim=1).split([9, 3, 3], dim=1)
    assert not key.is_contiguous()
    requests = Requests(8)
    batch = requests.batch([(requests.add([0] * 33, room=0), 33)])
    got = Runner(shape, team, torch.float32, None).attend(batch, query, key, value)
    assert (got.double() - _reference(shape, data, None)).abs().max() < 2e-6


def test_another_number_type_is_refused(team: ThreadTeam) -> None:
    shape = _SHAPES[0]
    data = _data(shape, 5, torch.bfloat16, seed=9)
    with pytest.raises(ValueError, match=r"heads must be torch\.float32"):
        Runner(shape, team, torch.float32, None).whole(data, 5)
    with pytest.raises(ValueError, match=r"float32 or bfloat16, not torch\.float16"):
        PagedAttention(shape, 1, PoolSize(1, 16), torch.float16, team)
