"""What may draw tokens faster than torch: the interface between the sampler and a backend's own kernel.

Must not know: any device, requests, plans.
"""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from engine_service.worker.sampling_rows import SamplingRows


class RowDraw(Protocol):
    """Draws rows by the sampler's rule; only its exp may round in another way."""

    def takes(self, logits: torch.Tensor) -> bool:
        """Whether it can read logits of this kind."""
        ...

    def draw(self, logits: torch.Tensor, index: npt.NDArray[np.int64], rows: SamplingRows) -> torch.Tensor:
        """Token ids int64 [N] of the rows at `index` of logits [R, vocabulary], -1 for a row that has none left.

        `rows` are all R: their masks are applied, their other edits are not. A greedy row gets its best token.
        """
        ...
