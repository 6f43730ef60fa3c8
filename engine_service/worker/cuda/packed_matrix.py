"""A matrix of 4 or 8 bits a weight as it lies on the device, and how it is packed, quantized and unpacked.

Must not know: kernels, layers, checkpoints.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional

from engine_service.worker.quantized.coded_matrix import CodedMatrix

_RUNS = (64, 32, 16)  # inputs that a kernel takes at once; the products of tensor cores need 16
_UNPACKED_AT_ONCE = 1 << 22  # numbers, so that unpacking without a kernel takes little memory beside


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """weight[o, i] = scales[g, o] * (code[o, i] - zeros[g, o]) with g = i // group_size.

    `codes` uint8 [outputs, bytes], in blocks of `run` bytes. With 8 bits a byte is a code. With 4, byte j of block b
    has the code of input 2 * b * run + j in its low half and that of input 2 * b * run + run + j in its high half, so
    that either half of a block is neighbouring inputs of one group. Behind the last input lie zeros. `scales` and
    `zeros` [groups, outputs], in the smallest number type that holds them exactly.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    inputs: int
    bits: int
    run: int
    group_size: int

    @property
    def outputs(self) -> int:
        return self.codes.shape[0]

    @property
    def nbytes(self) -> int:
        return int(self.codes.nbytes + self.scales.nbytes + self.zeros.nbytes)


def run_of(group_size: int) -> int | None:
    """Neighbouring inputs that share a group and are taken at once, or None for groups that cannot be kept."""
    return next((run for run in _RUNS if group_size % run == 0), None)


def pack_matrix(coded: CodedMatrix, bits: int) -> PackedMatrix:
    """Groups of neighbours only. ValueError, with the number, for a group size that cannot be kept."""
    inputs, groups = coded.codes.shape[1], coded.scales.shape[1]
    size = coded.group_size if groups > 1 else -(-inputs // _RUNS[0]) * _RUNS[0]
    run = run_of(size)
    if run is None:
        raise ValueError(f"groups of {size} inputs are no multiple of {_RUNS[-1]}")
    codes = functional.pad(coded.codes, (0, -inputs % (run * 8 // bits)))
    if bits == 4:
        halves = codes.view(len(codes), -1, 2, run)
        codes = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)
    scales, zeros = (_narrow(part.T.contiguous()) for part in (coded.scales, coded.zeros))
    return PackedMatrix(codes.contiguous(), scales, zeros, inputs, bits, run, size)


def _narrow(values: torch.Tensor) -> torch.Tensor:
    for dtype in (torch.float16, torch.bfloat16):
        if torch.equal(values.to(dtype).float(), values):
            return values.to(dtype)
    return values


def quantise(weight: torch.Tensor, bits: int, group_size: int) -> CodedMatrix:
    """[outputs, inputs] to the nearest of 2 ** bits values between the least and the largest weight of each group, zero
    among them; scale and zero in half precision."""
    outputs, inputs = weight.shape
    grouped = functional.pad(weight.float(), (0, -inputs % group_size)).view(outputs, -1, group_size)
    low, high = grouped.amin(-1).clamp(max=0.0), grouped.amax(-1).clamp(min=0.0)
    scales = _half_above((high - low) / (2**bits - 1))
    steps = scales.where(scales > 0, torch.ones_like(scales))
    zeros = (-low / steps).clamp(0, 2**bits - 1).half().float()
    codes = (grouped / steps.unsqueeze(-1) + zeros.unsqueeze(-1)).round_().clamp_(0, 2**bits - 1)
    return CodedMatrix(codes.to(torch.uint8).flatten(1)[:, :inputs].contiguous(), scales, zeros, group_size)


def _half_above(values: torch.Tensor) -> torch.Tensor:
    """float32, positive: the least numbers of half precision that are not below; so both ends of a group have a code,
    also where half precision has few digits left."""
    halves = values.half()
    is_below = halves.float() < values
    return (halves.view(torch.int16) + is_below).view(torch.float16).float()


def unpack_into(matrix: PackedMatrix, out: torch.Tensor) -> None:
    """The weights, rounded to the number type of `out` [outputs, inputs]. In plain torch: some rows at a time."""
    groups = torch.arange(matrix.inputs, device=out.device) // matrix.group_size
    rows = max(1, _UNPACKED_AT_ONCE // matrix.inputs)
    for start in range(0, matrix.outputs, rows):
        part = slice(start, start + rows)
        codes = unpacked_codes(matrix.codes[part], matrix.bits, matrix.run)[:, : matrix.inputs]
        scales, zeros = (each[:, part].float().T[:, groups] for each in (matrix.scales, matrix.zeros))
        out[part] = codes.float().sub_(zeros).mul_(scales)


def unpacked_codes(packed: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """uint8 [rows, bytes] -> uint8 [rows, inputs and what lies behind them]."""
    if bits == 8:
        return packed
    blocks = packed.view(len(packed), -1, run)
    return torch.stack((blocks & 15, blocks >> 4), dim=2).flatten(1)
