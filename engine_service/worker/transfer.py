"""What crosses between the host and the device in each step: the interface, and the plain way.

Must not know: what the numbers mean to the scheduler, any device in particular.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy.typing as npt
import torch

from engine_service.worker.sampled import Sampled

Upload = Callable[[npt.NDArray], torch.Tensor]
"""An array's numbers as a tensor on the device. The array must not be changed before the step is over."""


@dataclass(frozen=True, slots=True)
class SampledLists:
    """`Sampled`, on the host."""

    token_ids: list[int]
    sound: list[bool]
    has_choice: list[bool] | None


Fetched = Callable[[], SampledLists]
"""Waits for a step's tokens."""


class Transfer(Protocol):
    """Not to be used from two threads at once."""

    @property
    def runs_ahead(self) -> bool:
        """Whether a step can be submitted while another is computed, without a thread for it."""
        ...

    def begin_step(self) -> None:
        """What follows belongs to the next step."""
        ...

    def upload(self, array: npt.NDArray) -> torch.Tensor: ...

    def fetch(self, sampled: Sampled) -> Fetched:
        """Begin to bring a step's tokens to the host."""
        ...


class DirectTransfer:
    """Tensors over the arrays themselves on a CPU, plain copies elsewhere; tokens are read when they are asked for."""

    runs_ahead = False

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin_step(self) -> None:
        """Nothing is kept from step to step."""

    def upload(self, array: npt.NDArray) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def fetch(self, sampled: Sampled) -> Fetched:
        return lambda: SampledLists(
            sampled.token_ids.tolist(),
            sampled.sound.tolist(),
            None if sampled.has_choice is None else sampled.has_choice.tolist(),
        )
