"""A copied block is the block: a request goes on from copies bit for bit, and the original is not touched."""

import pytest
import torch

from engine_service.worker.kernels.cpu_model import PoolSize
from engine_service.worker.kernels.library import ThreadTeam
from engine_service.worker.kernels.paged_attention import HeadShape, PagedAttention
from engine_service.worker.kernels.step_batch import batch_struct
from tests.unit.kernels.batches import Request, Requests
from tests.unit.kernels.models import DTYPES, build, make_prompt, make_reference


def fork(requests: Requests, origin: Request) -> tuple[Request, list[tuple[int, int]]]:
    """A request that shares nothing with `origin`, and the copies that give it the same KV."""
    twin = requests.add(origin.tokens, room=64)
    twin.computed = origin.computed
    return twin, list(zip(origin.blocks, twin.blocks, strict=True))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("length", [2, 16, 17, 31, 50])
def test_decoder_goes_on_from_copies(team: ThreadTeam, length: int, dtype: torch.dtype) -> None:
    model, requests = build(make_reference("llama"), team, dtype), Requests(80)
    origin = requests.add(make_prompt(length, seed=length))
    model.step(requests.batch([(origin, length - 1)]))
    twin, pairs = fork(requests, origin)
    model.copy_blocks(pairs)
    expected = model.step(requests.batch([(origin, 1)])).logits[0].clone()
    assert torch.equal(model.step(requests.batch([(twin, 1)])).logits[0], expected)
    # They part ways: what the twin writes does not reach the origin.
    alone = build(make_reference("llama"), team, dtype)
    same = Requests(80)
    lonely = same.add([*origin.tokens, 7])
    alone.step(same.batch([(lonely, length)]))
    twin.tokens.append(9)
    origin.tokens.append(7)
    model.step(requests.batch([(twin, 1)]))
    got = model.step(requests.batch([(origin, 1)])).logits[0].clone()
    assert torch.equal(got, alone.step(same.batch([(lonely, 1)])).logits[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block_size", [16, 48])
def test_attention_reads_copies(team: ThreadTeam, block_size: int, dtype: torch.dtype) -> None:
    shape = HeadShape(query_heads=4, kv_heads=2, head_size=20, scale=0.2)
    kernels = PagedAttention(shape, 2, PoolSize(40, block_size), dtype, team)
    requests = Requests(40, block_size)
    origin = requests.add([0] * 70, room=0)
    generator = torch.Generator().manual_seed(1)
    key, value = (torch.randn(70, 2, 20, generator=generator).to(dtype) for _ in range(2))
    query = torch.randn(1, 4, 20, generator=generator).to(dtype)
    written = requests.batch([(origin, 70)])
    for layer in range(2):
        view = batch_struct(written.slot_mapping, written.block_tables, written.query_start, written.seq_lens)
        kernels.write(layer, view, key * (layer + 1), value * (layer + 1))
    twin = requests.add([0] * 70, room=0)
    kernels.copy_blocks(list(zip(origin.blocks, twin.blocks, strict=True)))
    for layer in range(2):
        outs = []
        for request in (origin, twin):
            request.computed = 69
            last = requests.batch([(request, 1)])
            view = batch_struct(last.slot_mapping, last.block_tables, last.query_start, last.seq_lens)
            outs.append(kernels.attend(layer, view, query, None))
        assert torch.equal(*outs)
