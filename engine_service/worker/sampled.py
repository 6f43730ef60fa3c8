"""What a sampler gives for the rows of a step.

Must not know: how a token is drawn.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Sampled:
    """Token ids int64 [R] and, per row, whether the model's logits were sound, and whether some token was left to
    choose (None: in every row). A row that is not has token 0."""

    token_ids: torch.Tensor
    sound: torch.Tensor
    has_choice: torch.Tensor | None = None
