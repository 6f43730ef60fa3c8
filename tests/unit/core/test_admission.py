"""What is refused for ever, with the field and the numbers."""

import sys

import pytest

from engine_service.core.admission import (
    EngineLimits,
    check_request,
    resolve_max_tokens,
    servable_model_len,
)
from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.core.sampling import SamplingParams

LIMITS = EngineLimits(
    vocab_size=49_152, max_model_len=8_192, eos_token_ids=frozenset({2}), block_size=16, num_blocks=512
)
SMALL = EngineLimits(vocab_size=49_152, max_model_len=8_192, eos_token_ids=frozenset({2}), block_size=16, num_blocks=64)


def params(max_tokens=5, **changes):
    return SamplingParams(max_tokens=max_tokens, seed=1, **changes)


@pytest.mark.parametrize(
    ("tokens", "sampling", "field", "message"),
    [
        ([], params(), "prompt_token_ids", "the prompt is empty: at least 1 token is needed"),
        ([1] * 9_001, params(), "prompt_token_ids", "prompt of 9,001 tokens exceeds max_model_len 8,192"),
        ([1] * 8_193, params(), "prompt_token_ids", "prompt of 8,193 tokens exceeds max_model_len 8,192"),
        (
            [1] * 8_192, params(), "prompt_token_ids",
            "prompt of 8,192 tokens leaves no room for a new token within max_model_len 8,192",
        ),
        (
            [1, 2, 49_152, 50_000], params(), "prompt_token_ids",
            "token id 49152 at position 2 is outside the vocabulary 0..49151",
        ),
        (
            [0, -1, 49_152], params(), "prompt_token_ids",
            "token id -1 at position 1 is outside the vocabulary 0..49151",
        ),
        ([1], params(0), "sampling.max_tokens", "max_tokens 0 is below 1"),
        ([1], params(5, min_tokens=10), "sampling.min_tokens", "min_tokens 10 is not in 0..5 (max_tokens)"),
        ([1], params(5, min_tokens=-1), "sampling.min_tokens", "min_tokens -1 is not in 0..5 (max_tokens)"),
        (
            [1], params(stop_token_ids=frozenset({3, 49_152})), "sampling.stop_token_ids",
            "stop token id 49152 is outside the vocabulary 0..49151",
        ),
    ],
)  # fmt: skip
def test_refusals(tokens, sampling, field, message):
    """B027 and the limits of prompts: each mistake is named with its numbers."""
    assert check_request(tokens, sampling, LIMITS) == Refusal(RefusalCode.INVALID, message, field)


@pytest.mark.parametrize(
    ("tokens", "sampling"),
    [
        ([1], params()),
        ([0, 49_151], params()),
        ([1] * 8_191, params(1)),
        ([1] * 8_191, params(100)),  # stopped by the context
        ([1], params(5, min_tokens=5)),
        ([1], params(stop_token_ids=frozenset({0, 49_151}))),
    ],
)
def test_what_is_served(tokens, sampling):
    assert check_request(tokens, sampling, LIMITS) is None


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "field"),
    [
        (1_024, 1, None),  # the last token needs no slot
        (1_000, 25, None),
        (1_000, 26, "sampling.max_tokens"),
        (1_024, 2, "sampling.max_tokens"),
        (1_025, 1, "prompt_token_ids"),
    ],
)
def test_what_does_not_fit_the_pool_even_alone(prompt, max_tokens, field):
    refusal = check_request([1] * prompt, params(max_tokens), SMALL)
    assert (refusal and refusal.field) == field
    if refusal:
        assert f"prompt of {prompt:,} tokens with max_tokens {max_tokens}" in refusal.message
        assert refusal.message.endswith("needs 65 KV blocks of 16 tokens; the engine has 64")


@pytest.mark.parametrize(
    ("requested", "prompt", "resolved"),
    [(None, 10, 90), (5, 10, 5), (90, 10, 90), (91, 10, 90), (None, 99, 1), (7, 99, 1), (7, 100, 0), (None, 200, 0)],
)
def test_max_tokens_is_clamped_to_the_context(requested, prompt, resolved):
    assert resolve_max_tokens(requested, prompt, 100) == resolved


@pytest.mark.parametrize(
    ("max_model_len", "num_blocks", "servable"), [(8_192, 512, 8_192), (8_193, 512, 8_193), (8_192, 64, 1_025)]
)
def test_b145_the_longest_request_a_pool_can_serve(max_model_len, num_blocks, servable):
    assert servable_model_len(max_model_len, 16, num_blocks) == servable


def test_a_good_prompt_is_checked_without_python_work_per_token():
    """The number of Python function calls does not grow with the prompt."""

    def calls(length: int) -> int:
        count = 0

        def profile(frame, event, argument):
            nonlocal count
            count += 1

        tokens, sampling = [1] * length, params()
        sys.setprofile(profile)
        try:
            check_request(tokens, sampling, LIMITS)
        finally:
            sys.setprofile(None)
        return count

    assert calls(8_000) == calls(8)
