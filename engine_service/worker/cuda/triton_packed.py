"""Products with packed weights in Triton: a few rows at once, unpacked in registers; and unpacking of whole matrices.

A weight is scale * (code - zero), so a group's share of a sum is scale * (sum of x * code - zero * sum of x): codes are
multiplied as they are, on the tensor cores, and scales and zeros meet only sums, in float32.
Must not know: graphs, layers, how a kernel is chosen.
"""

import torch
import triton
import triton.language as tl

from engine_service.worker.cuda.packed_matrix import PackedMatrix

_TILE = 64  # outputs of a program
_ROW_TILES = (16, 32, 64)
_MOST_SPLITS = 16
_LEAST_BLOCKS = 4  # of each share of the inputs
_PROGRAMS_PER_PROCESSOR = 2
_MERGED = 1024  # outputs of a program that sums shares
_UNPACK_TILE = 32


@triton.jit
def _numbers(codes, like, BITS: tl.constexpr, OFFSET: tl.constexpr):
    """Codes as numbers of the type of `like`, four bits with OFFSET added: they become the last bits of a number whose
    last place is worth 1. Converting integers takes a GPU many times as long."""
    if BITS == 4:
        top: tl.constexpr = 0x6400 if OFFSET == 1024 else 0x4300
        return (codes.to(tl.uint16) | top).to(like, bitcast=True)
    # 2 ** 23 + code, then exactly the code.
    return ((codes.to(tl.uint32) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0).to(like)


@triton.jit
def _share(
    codes, inputs, scales, zeros, first, outputs, rows, count, num_outputs, num_inputs, groups, group_size,
    BITS: tl.constexpr, RUN: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """What RUN inputs of one group from `first` on add: codes [TILE, RUN] -> float32 [TILE, ROWS]."""
    places = first + tl.arange(0, RUN)
    is_there = (places < num_inputs)[:, None] & (rows < count)[None, :]
    x = tl.load(inputs + rows[None, :].to(tl.int64) * num_inputs + places[:, None], mask=is_there, other=0.0)
    # Behind the last input a block may go on.
    at = tl.minimum(first // group_size, groups - 1) * num_outputs + outputs
    is_output = outputs < num_outputs
    scale = tl.load(scales + at, mask=is_output, other=0.0).to(tl.float32)
    zero = tl.load(zeros + at, mask=is_output, other=0.0).to(tl.float32) + OFFSET
    sums = tl.sum(x.to(tl.float32), 0)
    product = tl.dot(_numbers(codes, inputs.dtype.element_ty, BITS, OFFSET), x)
    return (product - zero[:, None] * sums[None, :]) * scale[:, None]


@triton.jit
def _multiply(
    inputs, codes, scales, zeros, bias, out, count, num_outputs, num_inputs, row_bytes, groups, group_size,
    BITS: tl.constexpr, RUN: tl.constexpr, OFFSET: tl.constexpr, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of outputs (axis 0), one share of the inputs (1). Shares lie one after the other in `out`."""
    outputs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    split = tl.program_id(1)
    rows = tl.arange(0, ROWS)
    is_output = outputs < num_outputs
    bytes_ = codes + outputs[:, None].to(tl.int64) * row_bytes + tl.arange(0, RUN)[None, :]
    total = tl.zeros([TILE, ROWS], tl.float32)
    blocks = row_bytes // RUN
    share = tl.cdiv(blocks, SPLITS)
    for block in range(split * share, tl.minimum(split * share + share, blocks)):
        packed = tl.load(bytes_ + block * RUN, mask=is_output[:, None], other=0)
        if BITS == 4:
            first = block * 2 * RUN
            total += _share(
                packed & 15, inputs, scales, zeros, first, outputs, rows, count, num_outputs, num_inputs, groups,
                group_size, BITS, RUN, OFFSET,
            )  # fmt: skip
            total += _share(
                packed >> 4, inputs, scales, zeros, first + RUN, outputs, rows, count, num_outputs, num_inputs, groups,
                group_size, BITS, RUN, OFFSET,
            )  # fmt: skip
        else:
            total += _share(
                packed, inputs, scales, zeros, block * RUN, outputs, rows, count, num_outputs, num_inputs, groups,
                group_size, BITS, RUN, 0,
            )  # fmt: skip
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = (split * count + rows)[None, :].to(tl.int64) * num_outputs + outputs[:, None]
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_output[:, None] & (rows < count)[None, :])


@triton.jit
def _merge(shares, bias, out, count, num_outputs, SPLITS: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr):
    """One row (axis 0), some outputs (1); always in the same order."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_output = outputs < num_outputs
    total = tl.zeros([WIDTH], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(shares + (split * count + row) * num_outputs + outputs, mask=is_output, other=0.0)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + outputs, total.to(out.dtype.element_ty), mask=is_output)


@triton.jit
def _unpack(
    codes, scales, zeros, out, num_outputs, num_inputs, row_bytes, groups, group_size,
    BITS: tl.constexpr, RUN: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A tile of outputs (axis 0), one block (1)."""
    outputs = tl.program_id(0) * TILE + tl.arange(0, TILE)
    block = tl.program_id(1)
    is_output = outputs < num_outputs
    bytes_ = outputs[:, None].to(tl.int64) * row_bytes + block * RUN + tl.arange(0, RUN)[None, :]
    packed = tl.load(codes + bytes_, mask=is_output[:, None], other=0)
    for half in tl.static_range(8 // BITS):
        first = (block * (8 // BITS) + half) * RUN
        places = first + tl.arange(0, RUN)
        at = tl.minimum(first // group_size, groups - 1) * num_outputs + outputs
        scale = tl.load(scales + at, mask=is_output, other=0.0).to(tl.float32)
        zero = tl.load(zeros + at, mask=is_output, other=0.0).to(tl.float32)
        code = packed
        if BITS == 4:
            code = (packed >> (4 * half)) & 15
        weight = (code.to(tl.float32) - zero[:, None]) * scale[:, None]
        to = outputs[:, None].to(tl.int64) * num_inputs + places[None, :]
        mask = is_output[:, None] & (places < num_inputs)[None, :]
        tl.store(out + to, weight.to(out.dtype.element_ty), mask=mask)


class TritonProducts:
    """In bfloat16 and float16. How the inputs are shared out depends on the matrix alone, so that a row's sums are made
    in the same order whatever rows are beside it, but for the tile that the number of rows takes."""

    name = "triton"
    most_rows = _ROW_TILES[-1]

    def __init__(self, processors: int) -> None:
        """`processors` of the device, which should all have something to do."""
        self._processors = processors

    def multiply(self, inputs: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        inputs = inputs.contiguous()
        count, outputs = len(inputs), matrix.outputs
        out = inputs.new_empty(count, outputs)
        if count == 0:
            return out
        tiles = triton.cdiv(outputs, _TILE)
        splits = num_splits(tiles, matrix.codes.shape[1] // matrix.run, self._processors)
        shares = out if splits == 1 else inputs.new_empty(splits, count, outputs, dtype=torch.float32)
        added = matrix.scales if bias is None else bias  # something to point to
        _multiply[(tiles, splits)](
            inputs, matrix.codes, matrix.scales, matrix.zeros, added, shares, count, outputs, matrix.inputs,
            matrix.codes.shape[1], len(matrix.scales), matrix.group_size,
            BITS=matrix.bits, RUN=matrix.run, OFFSET=_offset(inputs.dtype), SPLITS=splits,
            HAS_BIAS=bias is not None and splits == 1, ROWS=next(rows for rows in _ROW_TILES if rows >= count),
            TILE=_TILE, num_warps=4, num_stages=4,
        )  # fmt: skip
        if splits > 1:
            _merge[(count, triton.cdiv(outputs, _MERGED))](
                shares, added, out, count, outputs, SPLITS=splits, HAS_BIAS=bias is not None, WIDTH=_MERGED
            )
        return out

    def unpack(self, matrix: PackedMatrix, out: torch.Tensor) -> None:
        row_bytes = matrix.codes.shape[1]
        _unpack[(triton.cdiv(matrix.outputs, _UNPACK_TILE), row_bytes // matrix.run)](
            matrix.codes, matrix.scales, matrix.zeros, out, matrix.outputs, matrix.inputs, row_bytes,
            len(matrix.scales), matrix.group_size, BITS=matrix.bits, RUN=matrix.run, TILE=_UNPACK_TILE,
        )  # fmt: skip


def num_splits(tiles: int, blocks: int, processors: int) -> int:
    """Shares of the inputs, so that the device has enough to do: a power of two, as few sizes are compiled."""
    splits = 1
    while (
        splits < _MOST_SPLITS
        and 2 * splits * tiles <= _PROGRAMS_PER_PROCESSOR * processors
        and 2 * splits * _LEAST_BLOCKS <= blocks
    ):
        splits *= 2
    return splits


def _offset(dtype: torch.dtype) -> int:
    """The least number whose last place is worth 1, see `_numbers`."""
    return 1024 if dtype is torch.float16 else 128
