"""From the wire to the engine: the sampling parameters, each honoured or refused with its path and numbers.

Ranges and sizes are checked here; what depends on the model's vocabulary in `core/admission.py`.
Must not know: the rest of a request, gRPC calls, what is running.
"""

import math
from collections.abc import Callable

from engine_service.api.invalid import Invalid
from engine_service.api.parse_structured import parse_structured_output
from engine_service.core.admission import EngineLimits, resolve_max_tokens
from engine_service.core.sampling import SamplingDefaults, SamplingParams
from tokenwire.common.v1 import sampling_pb2

MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_LOGPROBS = 20
MAX_SAMPLES = 64
_MAX_BIAS = 100.0
_MAX_PENALTY = 2.0


def parse_sampling(
    message: sampling_pb2.SamplingParams,
    prompt_tokens: int,
    limits: EngineLimits,
    defaults: SamplingDefaults,
    draw_seed: Callable[[], int],
) -> SamplingParams:
    """The parameters with every unset field filled. Raises Invalid."""
    requested = message.max_tokens if message.HasField("max_tokens") else None
    if requested is not None and requested < 1:
        raise Invalid("sampling.max_tokens", f"max_tokens {requested:,} is below 1")
    return SamplingParams(
        max_tokens=resolve_max_tokens(requested, prompt_tokens, limits.max_model_len),
        seed=message.seed if message.HasField("seed") else draw_seed(),
        min_tokens=_min_tokens(message, requested),
        temperature=_temperature(message, defaults.temperature),
        top_k=_top_k(message, defaults.top_k, limits.vocab_size),
        top_p=_top_p(message, defaults.top_p),
        min_p=_min_p(message, defaults.min_p),
        stop_token_ids=_stop_token_ids(message),
        ignore_eos=message.ignore_eos,
        repetition_penalty=_repetition_penalty(message, defaults.repetition_penalty),
        presence_penalty=_penalty("presence_penalty", message.presence_penalty),
        frequency_penalty=_penalty("frequency_penalty", message.frequency_penalty),
        logit_bias=_logit_bias(message),
        allowed_token_ids=frozenset(message.allowed_token_ids) if message.allowed_token_ids else None,
        banned_token_ids=frozenset(message.banned_token_ids),
        bad_words=_bad_words(message),
        logprobs=_logprobs("logprobs", message),
        prompt_logprobs=_logprobs("prompt_logprobs", message),
        structured_output=parse_structured_output(message),
    )


def parse_samples(message: sampling_pb2.SamplingParams) -> int:
    """How many samples of the prompt. Raises Invalid."""
    samples = message.n if message.HasField("n") else 1
    if not 1 <= samples <= MAX_SAMPLES:
        raise Invalid("sampling.n", f"n {samples:,} is not in 1..{MAX_SAMPLES}")
    return samples


def _min_tokens(message: sampling_pb2.SamplingParams, max_tokens: int | None) -> int:
    value = message.min_tokens
    if value < 0:
        raise Invalid("sampling.min_tokens", f"min_tokens {value:,} is negative")
    if max_tokens is not None and value > max_tokens:
        raise Invalid("sampling.min_tokens", f"min_tokens {value:,} exceeds max_tokens {max_tokens:,}")
    return value


def _temperature(message: sampling_pb2.SamplingParams, default: float) -> float:
    value = message.temperature if message.HasField("temperature") else default
    if not math.isfinite(value) or value < 0.0:
        raise Invalid("sampling.temperature", f"temperature {value:g} is not a finite number >= 0")
    return value


def _top_k(message: sampling_pb2.SamplingParams, default: int, vocab_size: int) -> int:
    value = message.top_k if message.HasField("top_k") else default
    if value < -1:
        raise Invalid("sampling.top_k", f"top_k {value:,} is below -1 (0 and -1: off)")
    return value if 0 < value < vocab_size else 0


def _top_p(message: sampling_pb2.SamplingParams, default: float) -> float:
    value = message.top_p if message.HasField("top_p") else default
    if not 0.0 < value <= 1.0:  # refuses NaN too
        raise Invalid("sampling.top_p", f"top_p {value:g} is not in (0, 1]")
    return value


def _min_p(message: sampling_pb2.SamplingParams, default: float) -> float:
    value = message.min_p if message.HasField("min_p") else default
    if not 0.0 <= value <= 1.0:
        raise Invalid("sampling.min_p", f"min_p {value:g} is not in [0, 1]")
    return value


def _stop_token_ids(message: sampling_pb2.SamplingParams) -> frozenset[int]:
    count = len(message.stop_token_ids)
    if count > MAX_STOP_TOKEN_IDS:
        raise Invalid("sampling.stop_token_ids", f"{count:,} stop token ids; at most {MAX_STOP_TOKEN_IDS} are allowed")
    return frozenset(message.stop_token_ids)


def _repetition_penalty(message: sampling_pb2.SamplingParams, default: float) -> float:
    value = message.repetition_penalty if message.HasField("repetition_penalty") else default
    if not 0.0 < value <= _MAX_PENALTY:
        raise Invalid("sampling.repetition_penalty", f"repetition_penalty {value:g} is not in (0, {_MAX_PENALTY:g}]")
    return value


def _penalty(name: str, value: float) -> float:
    if not -_MAX_PENALTY <= value <= _MAX_PENALTY:
        raise Invalid(f"sampling.{name}", f"{name} {value:g} is not in [-{_MAX_PENALTY:g}, {_MAX_PENALTY:g}]")
    return value


def _logit_bias(message: sampling_pb2.SamplingParams) -> tuple[tuple[int, float], ...]:
    biases = sorted(message.logit_bias.items())
    if len(biases) > MAX_LOGIT_BIASES:
        raise Invalid(
            "sampling.logit_bias", f"{len(biases):,} entries of logit_bias; at most {MAX_LOGIT_BIASES:,} are allowed"
        )
    for token, bias in biases:
        if not -_MAX_BIAS <= bias <= _MAX_BIAS:
            raise Invalid(
                "sampling.logit_bias",
                f"logit_bias {bias:g} of token id {token} is not in [-{_MAX_BIAS:g}, {_MAX_BIAS:g}]",
            )
    return tuple(biases)


def _bad_words(message: sampling_pb2.SamplingParams) -> tuple[tuple[int, ...], ...]:
    count = len(message.bad_words)
    if count > MAX_BAD_WORDS:
        raise Invalid("sampling.bad_words", f"{count:,} bad words; at most {MAX_BAD_WORDS} are allowed")
    for place, word in enumerate(message.bad_words):
        if not 1 <= len(word.token_ids) <= MAX_BAD_WORD_TOKENS:
            raise Invalid(
                "sampling.bad_words",
                f"bad word {place} has {len(word.token_ids):,} tokens; 1 to {MAX_BAD_WORD_TOKENS} are allowed",
            )
    return tuple(dict.fromkeys(tuple(word.token_ids) for word in message.bad_words))


def _logprobs(name: str, message: sampling_pb2.SamplingParams) -> int | None:
    if not message.HasField(name):  # type: ignore[arg-type]
        return None
    value: int = getattr(message, name)
    if not 0 <= value <= MAX_LOGPROBS:
        raise Invalid(f"sampling.{name}", f"{name} {value:,} is not in 0..{MAX_LOGPROBS}")
    return value
