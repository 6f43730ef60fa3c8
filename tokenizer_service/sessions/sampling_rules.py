"""Which sampling settings are in range; the fields are named as in SamplingParams.

Must not know: grpc, protobuf, prompts, what the settings do.
"""

import math
from collections.abc import Iterator, Sequence

from tokenizer_service.engines.messages import (
    Choice,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    SamplingOptions,
    StructuredOutput,
)
from tokenizer_service.engines.refusal import Violation

MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_SAMPLES = 64
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_TOKENS = 64
MAX_STRUCTURE_CHARS = 65_536


def sampling_violations(sampling: SamplingOptions, vocab_size: int) -> Iterator[Violation]:
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        yield Violation("max_tokens", f"{sampling.max_tokens} is below 1")
    yield from _min_tokens_violations(sampling)
    yield from _outside("temperature", sampling.temperature, 0.0, math.inf)
    if sampling.top_k is not None and sampling.top_k < -1:
        yield Violation("top_k", f"{sampling.top_k} is below -1 (0 and -1 mean off)")
    yield from _outside("top_p", sampling.top_p, 0.0, 1.0, is_low_open=True)
    yield from _outside("min_p", sampling.min_p, 0.0, 1.0)
    yield from _outside("repetition_penalty", sampling.repetition_penalty, 0.0, 2.0, is_low_open=True)
    yield from _outside("presence_penalty", sampling.presence_penalty, -2.0, 2.0)
    yield from _outside("frequency_penalty", sampling.frequency_penalty, -2.0, 2.0)
    yield from _count_outside("logprobs", sampling.logprobs, 0, MAX_LOGPROBS)
    yield from _count_outside("prompt_logprobs", sampling.prompt_logprobs, 0, MAX_LOGPROBS)
    yield from _count_outside("n", sampling.n, 1, MAX_SAMPLES)
    yield from _token_violations(sampling, vocab_size)
    yield from _structure_violations(sampling)


def _min_tokens_violations(sampling: SamplingOptions) -> Iterator[Violation]:
    low, high = sampling.min_tokens, sampling.max_tokens
    if low is None:
        return
    if low < 0:
        yield Violation("min_tokens", f"{low} is below 0")
    elif high is not None and low > high:
        yield Violation("min_tokens", f"{low} exceeds max_tokens {high}")


def _outside(
    field: str, value: float | None, low: float, high: float, *, is_low_open: bool = False
) -> Iterator[Violation]:
    if value is None:
        return
    above_low = value > low if is_low_open else value >= low
    if not (math.isfinite(value) and above_low and value <= high):
        interval = f"{'(' if is_low_open else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
        yield Violation(field, f"{value:g} is outside {interval}")


def _count_outside(field: str, value: int | None, low: int, high: int) -> Iterator[Violation]:
    if value is not None and not low <= value <= high:
        yield Violation(field, f"{value} is outside {low}..{high}")


def _token_violations(sampling: SamplingOptions, vocab_size: int) -> Iterator[Violation]:
    stops, allowed, banned = sampling.stop_token_ids, sampling.allowed_token_ids, sampling.banned_token_ids
    yield from _id_list_violations("stop_token_ids", stops, vocab_size, MAX_STOP_TOKEN_IDS)
    yield from _id_list_violations("allowed_token_ids", allowed, vocab_size, vocab_size)
    yield from _id_list_violations("banned_token_ids", banned, vocab_size, vocab_size)
    if max(len(allowed), len(banned)) <= vocab_size:
        if allowed and not set(allowed).difference(banned):
            yield Violation("allowed_token_ids", f"all of them ({len(allowed):,}) are banned; no token could come")
        elif len(banned) == vocab_size and len(set(banned)) == vocab_size:
            yield Violation("banned_token_ids", f"all {vocab_size:,} tokens are banned; no token could come")
    yield from _bias_violations(sampling.logit_bias, vocab_size)
    yield from _bad_word_violations(sampling.bad_words, vocab_size)


def _id_list_violations(field: str, ids: Sequence[int], vocab_size: int, most: int) -> Iterator[Violation]:
    if len(ids) > most:
        yield Violation(field, f"{len(ids):,} ids exceed the limit of {most:,}")
    yield from unknown_ids(field, ids[:most], vocab_size)


def unknown_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> Iterator[Violation]:
    """One for each id that is not in the vocabulary."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    for place, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            yield Violation(f"{field}[{place}]", _not_a_token(token_id, vocab_size))


def _not_a_token(token_id: int, vocab_size: int) -> str:
    return f"token id {token_id} is outside the vocabulary 0..{vocab_size - 1}"


def _bias_violations(biases: Sequence[tuple[int, float]], vocab_size: int) -> Iterator[Violation]:
    if len(biases) > MAX_BIASES:
        yield Violation("logit_bias", f"{len(biases):,} biases exceed the limit of {MAX_BIASES:,}")
    for token_id, bias in biases[:MAX_BIASES]:
        field = f"logit_bias[{token_id}]"
        if not 0 <= token_id < vocab_size:
            yield Violation(field, _not_a_token(token_id, vocab_size))
        yield from _outside(field, bias, -100.0, 100.0)


def _bad_word_violations(words: Sequence[Sequence[int]], vocab_size: int) -> Iterator[Violation]:
    if len(words) > MAX_BAD_WORDS:
        yield Violation("bad_words", f"{len(words):,} sequences exceed the limit of {MAX_BAD_WORDS}")
    for place, word in enumerate(words[:MAX_BAD_WORDS]):
        if not word:
            yield Violation(f"bad_words[{place}]", "a sequence may not be empty")
        yield from _id_list_violations(f"bad_words[{place}].token_ids", word, vocab_size, MAX_BAD_WORD_TOKENS)


def _structure_violations(sampling: SamplingOptions) -> Iterator[Violation]:
    output = sampling.structured_output
    if output is None:
        return
    name, texts = _constraint(output)
    size = sum(map(len, texts))
    if size > MAX_STRUCTURE_CHARS:
        yield Violation(f"structured_output.{name}", f"{size:,} characters exceed the limit of {MAX_STRUCTURE_CHARS:,}")
    if isinstance(output, Choice) and not output.values:
        yield Violation("structured_output.choice.values", "there is nothing to choose from; at least 1 is needed")
    elif not isinstance(output, Choice | JsonObject) and size == 0:
        yield Violation(f"structured_output.{name}", "is empty")
    if sampling.ignore_eos:
        yield Violation("ignore_eos", "excludes structured_output, which ends where its grammar is complete")


def _constraint(output: StructuredOutput) -> tuple[str, tuple[str, ...]]:
    """Its field in StructuredOutput and the texts in it."""
    match output:
        case JsonSchema(schema):
            return "json_schema", (schema,)
        case JsonObject():
            return "json_object", ()
        case Regex(pattern):
            return "regex", (pattern,)
        case Grammar(text):
            return "grammar", (text,)
        case Choice(values):
            return "choice", values
