"""How far the logits of lossy weights are from those of the reference, and the first tokens of the texts that show it.

Must not know: models, how weights are packed, requests.
"""

import torch

from engine_service.core.weight_report import LogitError

NUM_TEXTS = 4
TEXT_TOKENS = 16


def first_tokens(first: int, vocabulary: int) -> torch.Tensor:
    """int64 [texts, 1]: `first`, and three more tokens evenly spread over the vocabulary."""
    firsts = [(first + text * vocabulary // NUM_TEXTS) % vocabulary for text in range(NUM_TEXTS)]
    return torch.tensor(firsts).unsqueeze(1)


def compare_logits(expected: torch.Tensor, got: torch.Tensor, reference: torch.dtype) -> LogitError:
    """Both float32 [positions, vocabulary]; `reference`: the number type that the expected ones were computed in."""
    difference = (got - expected).abs()
    ours, theirs = got.log_softmax(-1), expected.log_softmax(-1)
    return LogitError(
        reference=str(reference).removeprefix("torch."),
        positions=len(expected),
        relative=float(difference.norm() / expected.norm()),
        largest=float(difference.max()),
        mean=float(difference.mean()),
        divergence=float((theirs.exp() * (theirs - ours)).sum(-1).mean()),
        same_best=float((got.argmax(-1) == expected.argmax(-1)).float().mean()),
    )
