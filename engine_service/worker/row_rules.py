"""What one request wants done to its logits, made ready for the device once.

Must not know: steps, other requests, how a token is drawn.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_service.core.sampling import SamplingParams
from engine_service.core.token_rules import excluded_tokens

# In float32 a smaller one would turn large logits into infinities.
_SMALLEST_REPETITION_PENALTY = 1e-30
ANY_TOKEN = -1
"""In `BadWords.before`: the word is shorter, whatever is here."""


@dataclass(frozen=True, slots=True)
class BadWords:
    """W words of several tokens: `before` int32 [W, L], all but the last token of each, at the right end;
    `last` int64 [W]."""

    before: torch.Tensor
    last: torch.Tensor


@dataclass(frozen=True, slots=True)
class RowRules:
    """`offsets` float32 [vocabulary]: added to the logits; -inf for tokens that never come."""

    prompt_length: int
    offsets: torch.Tensor | None
    bad_words: BadWords | None
    repetition: float
    presence: float
    frequency: float

    @property
    def counts_completion(self) -> bool:
        return self.presence != 0.0 or self.frequency != 0.0


def make_row_rules(
    sampling: SamplingParams, prompt_length: int, vocab_size: int, device: torch.device
) -> RowRules | None:
    """None for a request that takes its logits as they are."""
    rules = RowRules(
        prompt_length,
        _offsets(sampling, vocab_size, device),
        _bad_words([word for word in sampling.bad_words if len(word) > 1], device),
        max(sampling.repetition_penalty, _SMALLEST_REPETITION_PENALTY),
        sampling.presence_penalty,
        sampling.frequency_penalty,
    )
    is_needed = (
        rules.offsets is not None or rules.bad_words is not None or rules.repetition != 1.0 or rules.counts_completion
    )
    return rules if is_needed else None


def _offsets(sampling: SamplingParams, vocab_size: int, device: torch.device) -> torch.Tensor | None:
    """A ban outweighs every bias: -inf plus anything is -inf."""
    excluded = excluded_tokens(sampling)
    allowed = sampling.allowed_token_ids
    if not excluded and allowed is None and not sampling.logit_bias:
        return None
    offsets = torch.zeros(vocab_size)
    if allowed is not None:
        offsets.fill_(float("-inf"))
        offsets[sorted(allowed)] = 0.0
    if sampling.logit_bias:
        tokens, biases = zip(*sampling.logit_bias, strict=True)
        offsets[list(tokens)] += torch.tensor(biases)
    if excluded:
        offsets[sorted(excluded)] = float("-inf")
    return offsets.to(device)


def _bad_words(words: Sequence[Sequence[int]], device: torch.device) -> BadWords | None:
    if not words:
        return None
    width = max(map(len, words)) - 1
    padded = [[ANY_TOKEN] * (width + 1 - len(word)) + list(word[:-1]) for word in words]
    last = [word[-1] for word in words]
    return BadWords(torch.tensor(padded, dtype=torch.int32, device=device), torch.tensor(last, device=device))
