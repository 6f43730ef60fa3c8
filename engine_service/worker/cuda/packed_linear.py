"""A linear layer over packed weights: products of few rows unpack as they go, those of many rows unpack first.

Must not know: layers, checkpoints, which kernel multiplies.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from engine_service.worker.cuda.packed_matrix import PackedMatrix, unpack_into


class PackedProducts(Protocol):
    """A way to compute with packed matrices."""

    @property
    def name(self) -> str: ...

    @property
    def most_rows(self) -> int:
        """`multiply` takes so many rows at most; 0: it takes none."""
        ...

    def multiply(self, inputs: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        """[T, inputs] -> [T, outputs], summed in float32, the weights not rounded."""
        ...

    def unpack(self, matrix: PackedMatrix, out: torch.Tensor) -> None:
        """The weights, rounded to the number type of `out` [outputs, inputs]."""
        ...


class TorchProducts:
    """Everywhere, in any number type; every product unpacks first."""

    name = "torch"
    most_rows = 0

    def multiply(self, inputs: torch.Tensor, matrix: PackedMatrix, bias: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError("torch has no product of packed weights")

    def unpack(self, matrix: PackedMatrix, out: torch.Tensor) -> None:
        unpack_into(matrix, out)


class Scratch:
    """The one place where matrices are unpacked, as large as the largest of them. Taken while a model is loaded, so it
    is not free when the KV pool is sized. A device's work is in order: the next matrix may overwrite it."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._numbers = torch.empty(0, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return int(self._numbers.nbytes)

    def reserve(self, numbers: int) -> None:
        """Room for a matrix of so many; before the first product."""
        if numbers > len(self._numbers):
            dtype, device = self._numbers.dtype, self._numbers.device
            self._numbers = torch.empty(0, dtype=dtype, device=device)
            self._numbers = torch.empty(numbers, dtype=dtype, device=device)

    def matrix(self, outputs: int, inputs: int) -> torch.Tensor:
        return self._numbers[: outputs * inputs].view(outputs, inputs)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """`order` int64 [inputs]: the input that each column of the matrix belongs to; None: its own."""

    matrix: PackedMatrix
    order: torch.Tensor | None
    bias: torch.Tensor | None
    products: PackedProducts
    scratch: Scratch

    @property
    def nbytes(self) -> int:
        return self.matrix.nbytes

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            inputs = inputs.index_select(1, self.order)
        if len(inputs) <= self.products.most_rows:
            return self.products.multiply(inputs, self.matrix, self.bias)
        weight = self.scratch.matrix(self.matrix.outputs, self.matrix.inputs)
        self.products.unpack(self.matrix, weight)
        return functional.linear(inputs, weight, self.bias)
