"""How a model's weights are kept, and what that does to its logits: what is logged at the start and told to clients.

Must not know: tensors, how it is measured.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LogitError:
    """Against the reference, over `positions` tokens that the model itself wrote.

    `relative`: norm of the difference over the norm of the reference's logits. `largest` and `mean`: of the absolute
    differences. `divergence`: mean Kullback-Leibler divergence from the reference's distribution, nats. `same_best`:
    share of positions where both find the same best token. `reference`: its number type.
    """

    reference: str
    positions: int
    relative: float
    largest: float
    mean: float
    divergence: float
    same_best: float


@dataclass(frozen=True, slots=True)
class WeightReport:
    """`source`: how the checkpoint has its weights; `kept`: how the engine has those of the layers. `error` None: there
    is none, or it was not measured."""

    source: str
    kept: str
    error: LogitError | None = None
