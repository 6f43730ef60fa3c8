"""Decode attention over pages in Triton: for torch versions whose own attention takes no block tables, and any page.

A program reads one run of one request's keys, once, for all query heads that share them; runs are merged afterwards.
Online softmax as in M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018; splitting of keys as
in T. Dao et al., "Flash-Decoding for long-context inference", 2023.
Must not know: graphs, requests, how a kernel is chosen.
"""

import torch
import triton
import triton.language as tl

from engine_service.worker.attention import LayerShape
from engine_service.worker.cuda.kernel import KernelStep

_LOG2_E = 1.4426950408889634
_TILE = 64  # keys at once
_LEAST_ROWS = 16  # of a product on the tensor cores


@triton.jit(do_not_specialize=["table_width"])
def _attend_run(
    query,
    keys,
    values,
    tables,
    seq_lens,
    sums,
    largests,
    totals,
    out,
    scale,
    table_width,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """One request (axis 0), one KV head (1), one run of its keys (2). SIZE and GROUP are padded to WIDTH and ROWS."""
    request = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(seq_lens + request)
    first = length * 0
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    run = tl.cdiv(tl.cdiv(length - first, SPLITS), TILE) * TILE
    begin = first + split * run
    end = tl.minimum(begin + run, length)
    rows = tl.arange(0, ROWS)
    numbers = tl.arange(0, WIDTH)
    is_row = rows < GROUP
    is_number = numbers < SIZE
    head = (request * KV_HEADS + kv_head).to(tl.int64) * GROUP + rows
    here = head[:, None] * SIZE + numbers[None, :]
    is_here = is_row[:, None] & is_number[None, :]
    asked = tl.load(query + here, mask=is_here, other=0.0)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    result = tl.zeros([ROWS, WIDTH], tl.float32)
    for start in range(begin, end, TILE):
        places = start + tl.arange(0, TILE)
        inside = places < end
        page = tl.load(tables + request * table_width + places // PAGE, mask=inside, other=0).to(tl.int64)
        slots = ((page * PAGE + places % PAGE) * KV_HEADS + kv_head) * SIZE
        key = tl.load(keys + slots[None, :] + numbers[:, None], mask=inside[None, :] & is_number[:, None], other=0.0)
        scores = tl.dot(asked, key) * scale
        scores = tl.where(inside[None, :], scores, float("-inf"))
        above = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - above[:, None])
        shrink = tl.exp2(largest - above)
        is_value = inside[:, None] & is_number[None, :]
        value = tl.load(values + slots[:, None] + numbers[None, :], mask=is_value, other=0.0)
        result = result * shrink[:, None] + tl.dot(weights.to(value.dtype), value)
        total = total * shrink + tl.sum(weights, 1)
        largest = above
    if SPLITS == 1:
        tl.store(out + here, (result / total[:, None]).to(out.dtype.element_ty), mask=is_here)
    else:
        place = head * SPLITS + split
        tl.store(sums + place[:, None] * SIZE + numbers[None, :], result, mask=is_here)
        tl.store(largests + place, largest, mask=is_row)
        tl.store(totals + place, total, mask=is_row)


@triton.jit
def _merge_runs(
    sums, largests, totals, out, SIZE: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, WIDTH: tl.constexpr
):
    """One head of one request. A run without keys has a total of 0."""
    head = tl.program_id(0).to(tl.int64)
    runs = tl.arange(0, PADDED)
    numbers = tl.arange(0, WIDTH)
    is_run = runs < SPLITS
    is_number = numbers < SIZE
    place = head * SPLITS + runs
    largest = tl.load(largests + place, mask=is_run, other=float("-inf"))
    total = tl.load(totals + place, mask=is_run, other=0.0)
    mask = is_run[:, None] & is_number[None, :]
    result = tl.load(sums + place[:, None] * SIZE + numbers[None, :], mask=mask, other=0.0)
    weights = tl.exp2(largest - tl.max(largest, 0))
    merged = tl.sum(result * weights[:, None], 0) / tl.sum(total * weights, 0)
    tl.store(out + head * SIZE + numbers, merged.to(out.dtype.element_ty), mask=is_number)


def attend_decodes(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    step: KernelStep,
    shape: LayerShape,
    splits: int,
) -> torch.Tensor:
    """query [N, query heads, d], one token of each of the first N requests -> alike. The keys of a request are read in
    `splits` runs, side by side."""
    count, heads, size = query.shape
    group = shape.num_query_heads // shape.num_kv_heads
    width = triton.next_power_of_2(size)
    out = torch.empty_like(query)
    runs = count * heads * splits if splits > 1 else 0
    numbers = torch.empty(runs * (size + 2), dtype=torch.float32, device=query.device)
    sums, largests, totals = numbers.split([runs * size, runs, runs])
    _attend_run[(count, shape.num_kv_heads, splits)](
        query, keys, values, step.tables, step.seq_lens, sums, largests, totals, out,
        shape.scale * _LOG2_E, step.tables.stride(0),
        KV_HEADS=shape.num_kv_heads, GROUP=group, SIZE=size, PAGE=step.page_size, WINDOW=shape.sliding_window or 0,
        SPLITS=splits, ROWS=max(_LEAST_ROWS, triton.next_power_of_2(group)), WIDTH=width, TILE=_TILE,
    )  # fmt: skip
    if splits > 1:
        padded = triton.next_power_of_2(splits)
        _merge_runs[(count * heads,)](
            sums, largests, totals, out, SIZE=size, SPLITS=splits, PADDED=padded, WIDTH=width
        )  # fmt: skip
    return out
