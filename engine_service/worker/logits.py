"""What is looked for in the logits of a step before a token is drawn: the maximum, soundness.

Must not know: requests, how a token is drawn.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Peaks:
    """Per row, each [R]: the largest logit (own dtype), the lowest id that has it, whether it is finite."""

    values: torch.Tensor
    token_ids: torch.Tensor
    sound: torch.Tensor


def find_peaks(logits: torch.Tensor) -> Peaks:
    """One pass over [R, vocabulary]. A NaN or +inf anywhere makes the peak not finite; a row of -inf too."""
    values, token_ids = logits.max(dim=-1)
    return Peaks(values, token_ids, torch.isfinite(values))


def peaks_at(logits: torch.Tensor, best: torch.Tensor) -> Peaks:
    """The same of a backend's `best` int64 [R], -1 for a row that is not sound."""
    token_ids = best.clamp(min=0)
    return Peaks(logits.gather(1, token_ids.unsqueeze(1)).squeeze(1), token_ids, best >= 0)
