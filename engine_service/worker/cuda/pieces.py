"""What a decoder computes between its products of matrices, as functions that a compiler may make one kernel each of.

Must not know: layers, weights' names, attention.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass(frozen=True, slots=True)
class Pieces:
    """`norm(x [..., n], weight [n], epsilon)`; `add_norm(x, y, weight, epsilon)` -> x + y and its norm;
    `rotate(heads [T, h, d], cosine [T, 1, d / 2], sine)`; `gate([T, 2 n])` -> [T, n], silu of the first half times the
    second."""

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    add_norm: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float], tuple[torch.Tensor, torch.Tensor]]
    rotate: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    gate: Callable[[torch.Tensor], torch.Tensor]


def norm(values: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root mean square norm, B. Zhang, R. Sennrich, 2019."""
    return functional.rms_norm(values, weight.shape, weight, epsilon)


def add_norm(
    values: torch.Tensor, added: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = values + added
    return total, functional.rms_norm(total, weight.shape, weight, epsilon)


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding of pairs (i, i + d / 2), J. Su et al., RoFormer, 2021."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def gate(values: torch.Tensor) -> torch.Tensor:
    first, second = values.chunk(2, dim=-1)
    return functional.silu(first) * second


def plain_pieces() -> Pieces:
    return Pieces(norm, add_norm, rotate, gate)


def compiled_pieces(compiler: Compile) -> Pieces:
    """Each piece by `compiler`, for any number of tokens."""
    return Pieces(compiler(norm), compiler(add_norm), compiler(rotate), compiler(gate))


def torch_compiler(function: Callable[..., Any]) -> Callable[..., Any]:
    """By torch's own compiler, which takes seconds for each piece when it is first used."""
    compiled: Callable[..., Any] = torch.compile(function, dynamic=True)
    return compiled
