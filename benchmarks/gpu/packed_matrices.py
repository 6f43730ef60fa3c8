"""The matrices of a decoder that are kept in few bits, and the weights that they mean.

Must not know: models, timing.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine_service.worker.cuda.linear import Linear
from engine_service.worker.cuda.packed_linear import PackedLinear
from engine_service.worker.cuda.packed_matrix import PackedMatrix, unpack_into
from engine_service.worker.cuda.packed_source import PackedLinears
from engine_service.worker.cuda.weight_source import WeightSource


@dataclass(frozen=True, slots=True)
class _Made:
    """One matrix, of those that are named, each with its rows."""

    names: Mapping[str, int]
    matrix: PackedMatrix


class PackedMatrices:
    """A MakeLinear that remembers what it made."""

    def __init__(self, make: PackedLinears) -> None:
        self._make = make
        self._made: list[_Made] = []

    def __call__(
        self, source: WeightSource, names: Mapping[str, int], columns: int, bias: torch.Tensor | None
    ) -> Linear:
        linear = self._make(source, names, columns, bias)
        assert isinstance(linear, PackedLinear)
        self._made.append(_Made(dict(names), linear.matrix))
        return linear

    @property
    def num_weights(self) -> int:
        return sum(made.matrix.outputs * made.matrix.inputs for made in self._made)

    @property
    def nbytes(self) -> int:
        return sum(made.matrix.nbytes for made in self._made)

    def write(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Overwrites the tensors of those names by what the codes mean, in the tensors' number type."""
        with torch.no_grad():
            for made in self._made:
                whole = torch.empty(
                    made.matrix.outputs, made.matrix.inputs, dtype=torch.float32, device=made.matrix.codes.device
                )
                unpack_into(made.matrix, whole)
                for name, part in zip(made.names, torch.split(whole, list(made.names.values())), strict=True):
                    weights[name].copy_(part)
