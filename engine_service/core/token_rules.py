"""Which tokens a request may sample: whether its rules fit the vocabulary and leave anything.

Must not know: logits, torch, what is running.
"""

from collections.abc import Collection

from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.core.sampling import SamplingParams


def stop_tokens(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end the request."""
    return sampling.stop_token_ids if sampling.ignore_eos else sampling.stop_token_ids | eos_token_ids


def excluded_tokens(sampling: SamplingParams) -> frozenset[int]:
    """The tokens that never come, not counting those that are merely not among the allowed ones."""
    return sampling.banned_token_ids | {word[0] for word in sampling.bad_words if len(word) == 1}


def check_token_rules(sampling: SamplingParams, vocab_size: int, eos_token_ids: frozenset[int]) -> Refusal | None:
    """The first token id outside the vocabulary, or the rules that leave no token, or None."""
    named: tuple[tuple[str, str, Collection[int]], ...] = (
        ("stop_token_ids", "stop token id", sampling.stop_token_ids),
        ("logit_bias", "token id", [token for token, _ in sampling.logit_bias]),
        ("allowed_token_ids", "allowed token id", sampling.allowed_token_ids or ()),
        ("banned_token_ids", "banned token id", sampling.banned_token_ids),
        ("bad_words", "token id of a bad word", [token for word in sampling.bad_words for token in word]),
    )
    for field, kind, tokens in named:
        # The engine's loop checks again: what may be as long as the vocabulary is walked by built-ins only.
        if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
            outside = min(token for token in tokens if not 0 <= token < vocab_size)
            return _invalid(field, f"{kind} {outside} is outside the vocabulary 0..{vocab_size - 1}")
    return _check_rest(sampling, vocab_size, eos_token_ids)


def _check_rest(sampling: SamplingParams, vocab_size: int, eos_token_ids: frozenset[int]) -> Refusal | None:
    """Whether some token may come, also while `min_tokens` holds the stop tokens back."""
    excluded = excluded_tokens(sampling)
    allowed = sampling.allowed_token_ids
    if _num_left(allowed, excluded, vocab_size) == 0:
        count = vocab_size if allowed is None else len(allowed)
        field = "banned_token_ids" if allowed is None else "allowed_token_ids"
        return _invalid(field, f"none of {count:,} allowed tokens is left: {len(excluded):,} are banned or bad words")
    stops = {token for token in stop_tokens(sampling, eos_token_ids) if token < vocab_size}
    if sampling.min_tokens and _num_left(allowed, excluded | stops, vocab_size) == 0:
        return _invalid(
            "min_tokens",
            f"min_tokens {sampling.min_tokens:,} cannot be reached: every token that is left ends the request",
        )
    return None


def _num_left(allowed: frozenset[int] | None, excluded: frozenset[int], vocab_size: int) -> int:
    return vocab_size - len(excluded) if allowed is None else len(allowed - excluded)


def _invalid(field: str, message: str) -> Refusal:
    return Refusal(RefusalCode.INVALID, message, f"sampling.{field}")
