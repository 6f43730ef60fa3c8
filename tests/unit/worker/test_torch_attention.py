"""The torch backend against attention written out for one request at a time, without a cache."""

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.worker.attention import BatchLayout, KvGeometry, LayerShape
from engine_service.worker.kv_storage import allocate_kv
from engine_service.worker.torch_attention import TorchAttentionKind

CPU = torch.device("cpu")
BLOCKS = 64


def plain_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, shape: LayerShape) -> torch.Tensor:
    """[n, heads, d] at the last n of L positions -> [n, heads, value dim], head by head."""
    out = torch.zeros(query.shape[0], shape.num_query_heads, shape.value_dim)
    group = shape.num_query_heads // shape.num_kv_heads
    start = keys.shape[0] - query.shape[0]
    for row in range(query.shape[0]):
        position = start + row
        oldest = 0 if shape.sliding_window is None else max(0, position - shape.sliding_window + 1)
        for head in range(shape.num_query_heads):
            seen = slice(oldest, position + 1)
            scores = keys[seen, head // group] @ query[row, head] * shape.scale
            if shape.softcap is not None:
                scores = shape.softcap * torch.tanh(scores / shape.softcap)
            out[row, head] = torch.softmax(scores, 0) @ values[seen, head // group]
    return out


def layout_of(starts: list[int], lengths: list[int], tables: list[list[int]], size: int) -> BatchLayout:
    slots = [
        table[position // size] * size + position % size
        for start, length, table in zip(starts, lengths, tables, strict=True)
        for position in range(start, start + length)
    ]
    seq_lens = [start + length for start, length in zip(starts, lengths, strict=True)]
    width = max(len(table) for table in tables)
    padded = [table + [0] * (width - len(table)) for table in tables]
    bounds = [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    return BatchLayout(
        slot_mapping=torch.tensor(slots),
        query_start=torch.tensor(bounds, dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor(padded, dtype=torch.int32),
        query_lens_list=lengths,
        seq_lens_list=seq_lens,
    )


SHAPES = st.builds(
    LayerShape,
    num_query_heads=st.sampled_from([6, 12]),
    num_kv_heads=st.sampled_from([1, 3, 6]),
    key_dim=st.sampled_from([4, 8]),
    value_dim=st.sampled_from([4, 6]),
    scale=st.sampled_from([0.3, 1.0]),
    sliding_window=st.sampled_from([None, 1, 5, 100]),
    softcap=st.sampled_from([None, 0.8]),
)


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(SHAPES, min_size=1, max_size=2),
    requests=st.lists(st.tuples(st.integers(0, 20), st.integers(1, 12)), min_size=1, max_size=4),
    size=st.sampled_from([1, 4, 16]),
)
def test_two_steps_equal_plain_attention(shapes: list[LayerShape], requests: list[tuple[int, int]], size: int) -> None:
    """The context is written in one step, the chunk in the next; blocks are scattered over the pool."""
    geometry = KvGeometry(tuple(shapes), size, torch.float32, CPU)
    backend = TorchAttentionKind().build(geometry, BLOCKS * 4)
    generator = torch.Generator().manual_seed(0)
    free = torch.randperm(BLOCKS * 4, generator=generator).tolist()
    tables = [[free.pop() for _ in range(-(-(context + n) // size))] for context, n in requests]
    starts, lengths = [context for context, _ in requests], [n for _, n in requests]
    for layer, shape in enumerate(shapes):
        total = sum(starts) + sum(lengths)
        query = torch.randn(total, shape.num_query_heads, shape.key_dim, generator=generator)
        keys = torch.randn(total, shape.num_kv_heads, shape.key_dim, generator=generator)
        values = torch.randn(total, shape.num_kv_heads, shape.value_dim, generator=generator)
        parts = [0]
        for start, length in zip(starts, lengths, strict=True):
            parts.append(parts[-1] + start + length)
        spans = list(pairwise(parts))
        before = [row for (begin, _), start in zip(spans, starts, strict=True) for row in range(begin, begin + start)]
        now = [row for (begin, end), start in zip(spans, starts, strict=True) for row in range(begin + start, end)]
        if before:
            held = [place for place, start in enumerate(starts) if start]
            first = layout_of(
                [0] * len(held), [starts[place] for place in held], [tables[place] for place in held], size
            )
            backend.write_kv(layer, keys[before], values[before], backend.prepare(first))
        step = backend.prepare(layout_of(starts, lengths, tables, size))
        backend.write_kv(layer, keys[now], values[now], step)
        got = backend.attend(layer, query[now], step)
        expected = torch.cat(
            [
                plain_attention(query[begin + start : end], keys[begin:end], values[begin:end], shape)
                for (begin, end), start in zip(spans, starts, strict=True)
            ]
        )
        assert torch.allclose(got, expected, atol=1e-5)


def test_block_bytes_are_those_of_the_tensors() -> None:
    layer = LayerShape(4, 2, 8, 6, 1.0)
    kind = TorchAttentionKind()
    geometry = KvGeometry((layer, layer), 16, torch.bfloat16, CPU)
    assert kind.block_bytes(geometry) == 2 * 16 * 2 * (8 + 6) * 2
    kv = allocate_kv(geometry, 3)
    assert sum(t.nbytes for layer_kv in kv for t in (layer_kv.keys, layer_kv.values)) == 3 * kind.block_bytes(geometry)
