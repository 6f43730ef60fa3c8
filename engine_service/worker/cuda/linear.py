"""What a decoder multiplies with: a matrix in whatever form it is kept, and plain ones.

Must not know: layers, checkpoints, how other forms are packed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from engine_service.worker.cuda.weight_source import WeightSource


class Linear(Protocol):
    """`linear(x [T, inputs])` -> [T, outputs]. Fixed memory, nothing that the host would have to wait for."""

    @property
    def nbytes(self) -> int:
        """Of the weights, bytes that a product of few rows reads."""
        ...

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor: ...


MakeLinear = Callable[[WeightSource, Mapping[str, int], int, torch.Tensor | None], Linear]
"""Of the matrices that are named, each with its rows, one after the other; their columns; the bias of all of them.
KeyError for one that is missing, ValueError for one that does not fit."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """weight [outputs, inputs] in the model's number type."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        return int(self.weight.nbytes)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Matrices of the same inputs that cannot be kept as one: their outputs one after the other."""

    parts: Sequence[Linear]

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.cat([part(inputs) for part in self.parts], dim=-1)


def plain_linear(source: WeightSource, names: Mapping[str, int], columns: int, bias: torch.Tensor | None) -> Linear:
    return PlainLinear(source.join(names, columns), bias)
