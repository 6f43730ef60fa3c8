"""What every generating endpoint takes to say how to sample, and the GenerationOptions that it means.

Must not know: prompts, answers, the ranges of values (`sessions.validation` checks them).
"""

from dataclasses import replace
from typing import Any

from tokenizer_service.engines.messages import SamplingOptions
from tokenizer_service.http.errors import HttpError, bad_field
from tokenizer_service.http.fields import Fields, Int32, Int64
from tokenizer_service.http.structured_fields import StructuredFields
from tokenizer_service.sessions.request import GenerationOptions

MAX_BAD_WORDS = 128


class StreamOptions(Fields):
    """`include_obfuscation` changes nothing: answers are not padded."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(Fields):
    """Common to all; the names are OpenAI's, and vLLM's for what OpenAI lacks."""

    model: str = ""
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int64 | None = None
    min_p: float | None = None
    seed: Int64 | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int64] | None = None
    ignore_eos: bool | None = None
    min_tokens: Int64 | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int64] | None = None
    banned_token_ids: list[Int64] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    priority: Int32 | None = None
    # Accepted and of no effect, on purpose: docs/http.md lists them.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None


class SampledFields(GenerationFields, StructuredFields):
    """Common to chat and completions."""

    stream_options: StreamOptions | None = None
    n: Int64 | None = None
    best_of: Int64 | None = None
    prompt_logprobs: Int64 | None = None
    return_token_ids: bool = False


def generation_options(
    fields: GenerationFields, sampling: SamplingOptions, bad_words: tuple[tuple[int, ...], ...]
) -> GenerationOptions | HttpError:
    """`sampling` has what the API names in its own way; the common fields are added."""
    bias = _bias(fields.logit_bias or {})
    if isinstance(bias, HttpError):
        return bias
    return GenerationOptions(
        sampling=replace(
            sampling,
            min_tokens=fields.min_tokens,
            temperature=fields.temperature,
            top_k=fields.top_k,
            top_p=fields.top_p,
            min_p=fields.min_p,
            seed=fields.seed,
            stop_token_ids=tuple(fields.stop_token_ids or ()),
            ignore_eos=fields.ignore_eos,
            repetition_penalty=fields.repetition_penalty,
            presence_penalty=fields.presence_penalty,
            frequency_penalty=fields.frequency_penalty,
            logit_bias=bias,
            allowed_token_ids=tuple(fields.allowed_token_ids or ()),
            banned_token_ids=tuple(fields.banned_token_ids or ()),
            bad_words=bad_words,
        ),
        stops=_stops(fields.stop),
        include_stop=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
        cache_salt=fields.cache_salt,
        priority=fields.priority,
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _bias(given: dict[str, float]) -> tuple[tuple[int, float], ...] | HttpError:
    pairs = []
    for key, bias in given.items():
        if not (key.isascii() and key.removeprefix("-").isdecimal() and len(key) < 20):
            return bad_field("logit_bias", f"the key {key[:40]!r} is not a token id")
        pairs.append((int(key), bias))
    return tuple(pairs)


def check_sampled(fields: SampledFields) -> HttpError | None:
    """What chat and completions refuse whatever the model."""
    if fields.best_of is not None and fields.best_of != (fields.n or 1):
        return bad_field("best_of", f"{fields.best_of} is not supported; only n ({fields.n or 1}) is")
    if fields.stream_options is not None and not fields.stream:
        return bad_field("stream_options", "may only be set with stream")
    return check_common(fields)


def check_common(fields: GenerationFields) -> HttpError | None:
    if len(fields.bad_words or ()) > MAX_BAD_WORDS:
        return bad_field("bad_words", f"{len(fields.bad_words or ()):,} words exceed the limit of {MAX_BAD_WORDS}")
    if not all(fields.bad_words or ()):
        return bad_field("bad_words", "a word may not be empty")
    return None
