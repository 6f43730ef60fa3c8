"""What can never be served, judged before a request is queued, and how long a completion may get.

Must not know: what is queued or running now, gRPC, torch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine_service.core.kv_manager import blocks_for
from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.core.sampling import SamplingParams
from engine_service.core.token_rules import check_token_rules


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """`max_model_len` bounds prompt plus completion, in tokens; the pool has `num_blocks` of `block_size`."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    block_size: int
    num_blocks: int


def check_request(token_ids: Sequence[int], sampling: SamplingParams, limits: EngineLimits) -> Refusal | None:
    """The first reason why this engine can never serve the request, or None."""
    return (
        check_length(len(token_ids), sampling, limits.max_model_len, limits.block_size, limits.num_blocks)
        or _check_vocabulary(token_ids, limits.vocab_size)
        or check_token_rules(sampling, limits.vocab_size, limits.eos_token_ids)
    )


def check_resumed(prompt_tokens: int, resumed: Sequence[int], max_tokens: int, limits: EngineLimits) -> Refusal | None:
    """Whether completion tokens of another engine leave room for one more, and are in the vocabulary.

    `max_tokens` is what the request says, which may be more than the model's length allows.
    """
    if not resumed:
        return None
    count = len(resumed)
    if count >= max_tokens:
        message = f"{count:,} resumed tokens leave no room for a new token within max_tokens {max_tokens:,}"
    elif prompt_tokens + count >= limits.max_model_len:
        message = (
            f"prompt of {prompt_tokens:,} tokens and {count:,} resumed ones leave no room for a new token within "
            f"max_model_len {limits.max_model_len:,}"
        )
    else:
        return _check_vocabulary(resumed, limits.vocab_size, "resumed_token_ids")
    return _invalid("resumed_token_ids", message)


def check_length(
    prompt_tokens: int, sampling: SamplingParams, max_model_len: int, block_size: int, num_blocks: int
) -> Refusal | None:
    """Whether the token counts fit together, the context, and the pool with nothing else in it."""
    if prompt_tokens == 0:
        return _invalid("prompt_token_ids", "the prompt is empty: at least 1 token is needed")
    if prompt_tokens > max_model_len:
        return _invalid(
            "prompt_token_ids", f"prompt of {prompt_tokens:,} tokens exceeds max_model_len {max_model_len:,}"
        )
    if prompt_tokens == max_model_len:
        return _invalid(
            "prompt_token_ids",
            f"prompt of {prompt_tokens:,} tokens leaves no room for a new token within max_model_len {max_model_len:,}",
        )
    if sampling.max_tokens < 1:
        return _invalid("sampling.max_tokens", f"max_tokens {sampling.max_tokens:,} is below 1")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        return _invalid(
            "sampling.min_tokens",
            f"min_tokens {sampling.min_tokens:,} is not in 0..{sampling.max_tokens:,} (max_tokens)",
        )
    return _check_pool(prompt_tokens, sampling.max_tokens, max_model_len, block_size, num_blocks)


def resolve_max_tokens(requested: int | None, prompt_tokens: int, max_model_len: int) -> int:
    """Tokens that may be generated: what was asked for, clamped to the context. 0: the prompt fills it."""
    room = max(0, max_model_len - prompt_tokens)
    return room if requested is None else min(requested, room)


def servable_model_len(max_model_len: int, block_size: int, num_blocks: int) -> int:
    """The longest prompt + completion that a request alone in the pool can reach, at most `max_model_len`.

    The last token is never computed, so it needs no slot.
    """
    return min(max_model_len, num_blocks * block_size + 1)


def _check_pool(
    prompt_tokens: int, max_tokens: int, max_model_len: int, block_size: int, num_blocks: int
) -> Refusal | None:
    length = min(prompt_tokens + max_tokens, max_model_len)
    needed = blocks_for(length - 1, block_size)
    if needed <= num_blocks:
        return None
    return _invalid(
        "prompt_token_ids" if blocks_for(prompt_tokens, block_size) > num_blocks else "sampling.max_tokens",
        f"prompt of {prompt_tokens:,} tokens with max_tokens {max_tokens:,} needs {needed:,} KV blocks of "
        f"{block_size:,} tokens; the engine has {num_blocks:,}",
    )


def _check_vocabulary(token_ids: Sequence[int], vocab_size: int, field: str = "prompt_token_ids") -> Refusal | None:
    if min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return None
    position, token = next((i, t) for i, t in enumerate(token_ids) if not 0 <= t < vocab_size)
    return _invalid(
        field,
        f"token id {token} at position {position:,} is outside the vocabulary 0..{vocab_size - 1}",
    )


def _invalid(field: str, message: str) -> Refusal:
    return Refusal(RefusalCode.INVALID, message, field)
