"""An adapter that has been read: low-rank updates of a model's linear layers.

Must not know: files, the device, requests.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch


class LinearShape(NamedTuple):
    """Numbers a linear layer takes and gives."""

    inputs: int
    outputs: int


LinearShapes = Mapping[str, LinearShape]
"""Of each linear layer that an adapter may change, by the name that transformers gives it."""


class LowRank(NamedTuple):
    """y += (x down^T) up^T * scale (Hu et al., LoRA, 2021): `down` [rank, inputs], `up` [outputs, rank]."""

    down: torch.Tensor
    up: torch.Tensor

    def scaled_up(self, scale: float) -> torch.Tensor:
        """The second matrix with the scale in it, float32."""
        return self.up.float() * scale


@dataclass(frozen=True, slots=True)
class Adapter:
    """`updates` by the name of the layer. `fingerprint`: hex digest over the files; equal ones change a model alike."""

    rank: int
    scale: float
    updates: Mapping[str, LowRank]
    fingerprint: str

    def scaled_up(self, name: str) -> torch.Tensor:
        """The second matrix of a layer with the scale in it, float32."""
        return self.updates[name].scaled_up(self.scale)
