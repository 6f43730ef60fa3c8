"""Sampling settings between the wire, where clients and engines share one message, and plain data.

Must not know: which values are good.
"""

from collections.abc import Iterable
from typing import Any

from tokenizer_service.engines.messages import (
    Choice,
    Grammar,
    JsonObject,
    JsonSchema,
    Regex,
    SamplingOptions,
    StructuredOutput,
)
from tokenwire.common.v1 import sampling_pb2

_OPTIONAL = (
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "prompt_logprobs",
    "n",
)
_ID_LISTS = ("stop_token_ids", "allowed_token_ids", "banned_token_ids")


def sampling_options(params: sampling_pb2.SamplingParams) -> SamplingOptions:
    """What a message says; the unset stays unset. A structured output without a constraint reads as none."""
    given: dict[str, Any] = {
        name: getattr(params, name)
        for name in _OPTIONAL
        if params.HasField(name)  # type: ignore[arg-type]
    }
    return SamplingOptions(
        **given,
        stop_token_ids=tuple(params.stop_token_ids),
        allowed_token_ids=tuple(params.allowed_token_ids),
        banned_token_ids=tuple(params.banned_token_ids),
        logit_bias=tuple(sorted(params.logit_bias.items())),
        bad_words=tuple(tuple(word.token_ids) for word in params.bad_words),
        structured_output=_structured_output(params.structured_output),
    )


def _structured_output(message: sampling_pb2.StructuredOutput) -> StructuredOutput | None:
    match message.WhichOneof("constraint"):
        case "json_schema":
            return JsonSchema(message.json_schema)
        case "json_object":
            return JsonObject()
        case "regex":
            return Regex(message.regex)
        case "grammar":
            return Grammar(message.grammar)
        case "choice":
            return Choice(tuple(message.choice.values))
    return None


def fill_sampling(message: sampling_pb2.SamplingParams, options: SamplingOptions) -> None:
    """Writes what is set into an empty message."""
    for name in _OPTIONAL:
        value = getattr(options, name)
        if value is not None:
            setattr(message, name, value)
    for name in _ID_LISTS:
        getattr(message, name).extend(getattr(options, name))
    message.logit_bias.update(options.logit_bias)
    _fill_bad_words(message, options.bad_words)
    if options.structured_output is not None:
        _fill_structured_output(message.structured_output, options.structured_output)


def _fill_bad_words(message: sampling_pb2.SamplingParams, words: Iterable[Iterable[int]]) -> None:
    for word in words:
        message.bad_words.add().token_ids.extend(word)


def _fill_structured_output(message: sampling_pb2.StructuredOutput, output: StructuredOutput) -> None:
    match output:
        case JsonSchema(schema):
            message.json_schema = schema
        case JsonObject():
            message.json_object = True
        case Regex(pattern):
            message.regex = pattern
        case Grammar(text):
            message.grammar = text
        case Choice(values):
            message.choice.values.extend(values)
            message.choice.SetInParent()
