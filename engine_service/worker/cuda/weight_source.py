"""A checkpoint's tensors, brought to the device one by one.

Must not know: layers, how matrices are kept.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class WeightSource:
    """`weights` by the names that transformers gives. KeyError for one that is missing, ValueError for one of another
    shape than was asked for."""

    weights: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    device: torch.device

    def take(self, name: str, *shape: int) -> torch.Tensor:
        found = self.weights[name]
        check_shape(name, found, *shape)
        return found.to(device=self.device, dtype=self.dtype)

    def take_if_there(self, name: str, *shape: int) -> torch.Tensor | None:
        return self.take(name, *shape) if name in self.weights else None

    def join(self, names: Mapping[str, int], *columns: int) -> torch.Tensor:
        """Name -> rows, one after the other."""
        return torch.cat([self.take(name, rows, *columns) for name, rows in names.items()])


def check_shape(name: str, found: torch.Tensor, *shape: int) -> None:
    if found.shape != shape:
        sizes = (" x ".join(map(str, each)) for each in (found.shape, shape))
        raise ValueError(f"weights {name} are {next(sizes)}, not {next(sizes)}")
