"""Linear layers with packed weights: the codes of a quantized checkpoint as they are, or plain weights quantized.

Must not know: layers, which kernel multiplies, requests.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from engine_service.worker.cuda.linear import Linear, PlainLinear, SideBySide
from engine_service.worker.cuda.packed_linear import PackedLinear, PackedProducts, Scratch
from engine_service.worker.cuda.packed_matrix import pack_matrix, quantise, run_of
from engine_service.worker.cuda.weight_source import WeightSource, check_shape
from engine_service.worker.quantized.checkpoint import QuantizedCheckpoint
from engine_service.worker.quantized.coded_matrix import CodedMatrix
from engine_service.worker.quantized.scheme import Scheme

# Inputs that share a scale where we quantize: see docs/quantization.md for what others cost.
GROUP_SIZES = {4: 32, 8: 128}


def packing_refusal(scheme: Scheme | None, bits: int) -> str | None:
    """Why weights that a checkpoint has by that scheme cannot be kept with so many bits, or None."""
    if scheme is None:
        return None
    if scheme.bits != bits:
        return f"the checkpoint's weights have {scheme.bits} bits ({scheme.summary})"
    if scheme.group_size is not None and run_of(scheme.group_size) is None:
        return f"the checkpoint's group_size {scheme.group_size} is no multiple of 16"
    return None


@dataclass(frozen=True, slots=True)
class _Ordered:
    """Codes whose groups are neighbours, and the input of each column where that is another."""

    codes: CodedMatrix
    order: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PackedLinears:
    """Makes linear layers (a MakeLinear). What a quantized checkpoint has as plain weights stays so."""

    bits: int
    products: PackedProducts
    scratch: Scratch

    def __call__(
        self, source: WeightSource, names: Mapping[str, int], columns: int, bias: torch.Tensor | None
    ) -> Linear:
        found = [_read(source, name, rows, columns, self.bits) for name, rows in names.items()]
        coded = [part for part in found if isinstance(part, _Ordered)]
        if len(coded) == len(found) and _are_alike(coded):
            return self._pack(_join(coded), bias)
        biases = [None] * len(found) if bias is None else bias.split(list(names.values()))
        return SideBySide([self._keep(part, each) for part, each in zip(found, biases, strict=True)])

    def _keep(self, part: "_Ordered | torch.Tensor", bias: torch.Tensor | None) -> Linear:
        return PlainLinear(part, bias) if isinstance(part, torch.Tensor) else self._pack(part, bias)

    def _pack(self, part: _Ordered, bias: torch.Tensor | None) -> Linear:
        matrix = pack_matrix(part.codes, self.bits)
        self.scratch.reserve(matrix.outputs * matrix.inputs)
        return PackedLinear(matrix, part.order, bias, self.products, self.scratch)


def _read(source: WeightSource, name: str, rows: int, columns: int, bits: int) -> _Ordered | torch.Tensor:
    """A tensor where a quantized checkpoint has plain weights."""
    weights = source.weights
    if not isinstance(weights, QuantizedCheckpoint):
        return _Ordered(quantise(source.take(name, rows, columns), bits, GROUP_SIZES[bits]), None)
    coded = weights.coded(name)
    if coded is None:
        return source.take(name, rows, columns)
    check_shape(name, coded.codes, rows, columns)
    return _ordered(name, _on(coded, source.device))


def _on(coded: CodedMatrix, device: torch.device) -> CodedMatrix:
    codes, scales, zeros = (part.to(device) for part in (coded.codes, coded.scales, coded.zeros))
    index = None if coded.group_of is None else coded.group_of.to(device)
    return CodedMatrix(codes, scales, zeros, coded.group_size, index)


def _ordered(name: str, coded: CodedMatrix) -> _Ordered:
    """Columns by their groups. ValueError for groups of unequal sizes."""
    if coded.group_of is None:
        return _Ordered(coded, None)
    groups, order = coded.group_of.sort(stable=True)
    if not torch.equal(groups, torch.arange(len(groups), device=groups.device) // coded.group_size):
        raise ValueError(
            f"the groups of {name} (desc_act) have not {coded.group_size} inputs each, so its weights cannot be packed"
        )
    return _Ordered(replace(coded, codes=coded.codes[:, order], group_of=None), order)


def _are_alike(parts: Sequence[_Ordered]) -> bool:
    """One matrix can hold them all."""
    first = parts[0]
    for part in parts[1:]:
        if part.codes.group_size != first.codes.group_size or (part.order is None) != (first.order is None):
            return False
        if part.order is not None and first.order is not None and not torch.equal(part.order, first.order):
            return False
    return True


def _join(parts: Sequence[_Ordered]) -> _Ordered:
    codes, scales, zeros = (
        torch.cat([getattr(part.codes, field) for part in parts]) for field in ("codes", "scales", "zeros")
    )
    return _Ordered(CodedMatrix(codes, scales, zeros, parts[0].codes.group_size), parts[0].order)
