"""Sampling settings and constraints of the library as messages, and back.

Must not know: prompts, conversations, calls. Ranges are the service's to check.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tokenwire.common.v1 import sampling_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client.errors import invalid
from tokenwire_client.structured import Choice, Grammar, JsonObject, JsonSchema, Regex, StructuredOutput
from tokenwire_client.types import Sampling
from tokenwire_client.wire import elements, put, put_all, put_map, shown

_KNOBS = (
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
_PATH = "options.sampling"


def put_options(
    options: pb.GenerationOptions, sampling: Sampling, cache_salt: str | None, priority: int | None
) -> None:
    """Raises InvalidRequest for what the wire cannot carry."""
    knobs: sampling_pb2.SamplingParams = options.sampling
    for name in _KNOBS:
        put(knobs, name, getattr(sampling, name), f"{_PATH}.{name}")
    for name in _ID_LISTS:
        put_all(knobs, name, getattr(sampling, name), f"{_PATH}.{name}")
    put_map(knobs, "logit_bias", sampling.logit_bias, f"{_PATH}.logit_bias")
    _put_bad_words(knobs, sampling.bad_words)
    if sampling.structured_output is not None:
        _put_structured_output(knobs.structured_output, sampling.structured_output)
    put_all(options, "stop", sampling.stop, "options.stop")
    for name in ("include_stop_str_in_output", "skip_special_tokens"):
        put(options, name, getattr(sampling, name), f"options.{name}")
    put(options, "cache_salt", cache_salt, "options.cache_salt")
    put(options, "priority", priority, "options.priority")


def _put_bad_words(knobs: sampling_pb2.SamplingParams, words: Sequence[Sequence[int]]) -> None:
    path = f"{_PATH}.bad_words"
    for index, word in enumerate(elements(words, path)):
        put_all(knobs.bad_words.add(), "token_ids", word, f"{path}[{index}]")


def _put_structured_output(message: sampling_pb2.StructuredOutput, output: object) -> None:
    path = f"{_PATH}.structured_output"
    match output:
        case JsonSchema(schema):
            put(message, "json_schema", json_text(schema, f"{path}.json_schema"), f"{path}.json_schema")
        case JsonObject():
            message.json_object = True
        case Regex(pattern):
            put(message, "regex", pattern, f"{path}.regex")
        case Grammar(text):
            put(message, "grammar", text, f"{path}.grammar")
        case Choice(values):
            message.choice.SetInParent()
            put_all(message.choice, "values", values, f"{path}.choice.values")
        case _:
            kinds = "JsonSchema, JsonObject, Regex, Grammar or Choice"
            raise invalid(path, f"must be a {kinds}, got {shown(output)}")


def json_text(value: object, path: str) -> object:
    """A mapping or truth value as JSON text; anything else as it is."""
    if not isinstance(value, Mapping | bool):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, default=_plain_mapping)
    except TypeError as error:
        raise invalid(path, f"cannot be written as JSON: {error}") from None
    except (ValueError, RecursionError):
        raise invalid(path, "cannot be written as JSON: a number is not finite, or the nesting has no end") from None


def _plain_mapping(value: object) -> dict[object, object]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{shown(value)} is no JSON value")
    return dict(value)


def sampling_from(params: sampling_pb2.SamplingParams) -> Sampling:
    """What a message says; the unset stays unset."""
    given: dict[str, Any] = {
        name: getattr(params, name)
        for name in _KNOBS
        if params.HasField(name)  # type: ignore[arg-type]
    }
    return Sampling(
        **given,
        stop_token_ids=tuple(params.stop_token_ids),
        allowed_token_ids=tuple(params.allowed_token_ids),
        banned_token_ids=tuple(params.banned_token_ids),
        logit_bias=dict(params.logit_bias) or None,
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
