"""What a worker needs of the other ranks that compute the same model with it, and the worker that has none.

Must not know: processes, how ranks talk.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from engine_service.core.plan import Plan

if TYPE_CHECKING:
    import torch


class RankLost(RuntimeError):
    """A rank has ended while it was needed; the message says which. No step can be computed any more."""


@dataclass(frozen=True, slots=True)
class RankPool:
    """The KV pool that every rank allocates for its own heads: the same blocks on all."""

    block_size: int
    num_blocks: int
    max_model_len: int


class OtherRanks(Protocol):
    """Called by rank 0, in the same order as its steps."""

    def smallest(self, number: int) -> int:
        """The smallest of the numbers that the ranks have here."""
        ...

    def allocate(self, pool: RankPool) -> None:
        """They build their pools and are then ready for plans."""
        ...

    def start(self, plan: Plan) -> None:
        """They execute this plan, as rank 0 does next."""
        ...

    def store(self, token_ids: "torch.Tensor") -> None:
        """They append the tokens that the step sampled to their requests: int64 [R], on the device."""
        ...

    def explain(self, error: RuntimeError) -> RuntimeError:
        """The reason behind an error of a step: RankLost if a rank has ended, else the error itself."""
        ...

    def close(self) -> None:
        """They end."""
        ...


class NoOtherRanks:
    """The whole model is here."""

    def smallest(self, number: int) -> int:
        return number

    def allocate(self, pool: RankPool) -> None:
        pass

    def start(self, plan: Plan) -> None:
        pass

    def store(self, token_ids: "torch.Tensor") -> None:
        pass

    def explain(self, error: RuntimeError) -> RuntimeError:
        return error

    def close(self) -> None:
        pass
