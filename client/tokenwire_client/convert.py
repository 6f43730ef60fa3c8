"""Between the library's types and the messages on the wire.

Must not know: channels, calls, statuses. What protobuf would refuse is refused here, by the path of its
field as the service would name it, before anything is sent; ranges are the service's to check.
"""

from collections.abc import Iterable, MutableSequence, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message as ProtoMessage

from tokenwire.common.v1 import health_pb2, sampling_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client.errors import invalid
from tokenwire_client.types import Health, HealthStatus, Message, Model, Sampling

_KNOBS = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")

_WANTED: dict[int, str] = {
    FieldDescriptor.TYPE_STRING: "text without lone surrogates",
    FieldDescriptor.TYPE_BOOL: "true or false",
    FieldDescriptor.TYPE_DOUBLE: "a number",
    FieldDescriptor.TYPE_INT64: "an integer from -2^63 to 2^63 - 1",
    FieldDescriptor.TYPE_UINT32: "an integer from 0 to 2^32 - 1",
}

_HEALTH_STATUS = {
    health_pb2.SERVING_STATUS_SERVING: HealthStatus.SERVING,
    health_pb2.SERVING_STATUS_NOT_SERVING: HealthStatus.NOT_SERVING,
    health_pb2.SERVING_STATUS_SERVICE_UNKNOWN: HealthStatus.SERVICE_UNKNOWN,
}

Element = TypeVar("Element")


def generate_request(
    prompt: str | Sequence[int],
    sampling: Sampling,
    *,
    model: str,
    add_special_tokens: bool | None,
    cache_salt: str | None,
    request_id: str,
) -> pb.GenerateRequest:
    """A prompt to continue. Raises InvalidRequest for what the wire cannot carry; so do all below."""
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        _put(request, "text", prompt, "text")
    else:
        request.token_ids.SetInParent()
        _put_all(request.token_ids, "ids", prompt, "token_ids.ids")
    _put(request, "model", model, "model")
    _put(request, "add_special_tokens", add_special_tokens, "add_special_tokens")
    _put(request, "request_id", request_id, "request_id")
    _put_options(request.options, sampling, cache_salt)
    return request


def chat_request(
    messages: Sequence[Message],
    sampling: Sampling,
    *,
    model: str,
    add_generation_prompt: bool | None,
    cache_salt: str | None,
    request_id: str,
) -> pb.ChatRequest:
    """A conversation to continue; the messages in order, oldest first."""
    request = pb.ChatRequest()
    _put_messages(request.messages, messages, "messages")
    _put(request, "model", model, "model")
    _put(request, "add_generation_prompt", add_generation_prompt, "add_generation_prompt")
    _put(request, "request_id", request_id, "request_id")
    _put_options(request.options, sampling, cache_salt)
    return request


def tokenize_request(
    source: str | Sequence[Message],
    *,
    model: str,
    add_special_tokens: bool | None,
    add_generation_prompt: bool | None,
) -> pb.TokenizeRequest:
    """Text, or messages for the template."""
    request = pb.TokenizeRequest()
    if isinstance(source, str):
        if add_generation_prompt is not None:
            raise invalid("conversation.add_generation_prompt", "is for messages, and the input is text")
        _put(request, "text", source, "text")
    else:
        conversation = request.conversation
        conversation.SetInParent()
        _put_messages(conversation.messages, source, "conversation.messages")
        field = "conversation.add_generation_prompt"
        _put(conversation, "add_generation_prompt", add_generation_prompt, field)
    _put(request, "model", model, "model")
    _put(request, "add_special_tokens", add_special_tokens, "add_special_tokens")
    return request


def detokenize_request(
    token_ids: Sequence[int], *, model: str, skip_special_tokens: bool | None
) -> pb.DetokenizeRequest:
    """Ids as given: the service says what is wrong with one out of the vocabulary."""
    request = pb.DetokenizeRequest()
    _put_all(request, "token_ids", token_ids, "token_ids")
    _put(request, "model", model, "model")
    _put(request, "skip_special_tokens", skip_special_tokens, "skip_special_tokens")
    return request


def health_query(service: str) -> health_pb2.HealthQuery:
    """The standard health check's question."""
    query = health_pb2.HealthQuery()
    _put(query, "service", service, "service")
    return query


def health_from(answer: health_pb2.HealthAnswer) -> Health:
    """Statuses that are not known here are UNKNOWN."""
    return Health(_HEALTH_STATUS.get(answer.status, HealthStatus.UNKNOWN))


def models_from(answer: pb.ListModelsResponse) -> tuple[Model, ...]:
    """In the order of the service."""
    return tuple(
        Model(
            name=each.name,
            vocab_size=each.vocab_size,
            max_model_len=each.max_model_len,
            eos_token_ids=tuple(each.eos_token_ids),
            tokenizer_fingerprint=each.tokenizer_fingerprint,
            connected_engines=each.connected_engines,
        )
        for each in answer.models
    )


def _put_options(options: pb.GenerationOptions, sampling: Sampling, cache_salt: str | None) -> None:
    knobs: sampling_pb2.SamplingParams = options.sampling
    for name in _KNOBS:
        _put(knobs, name, getattr(sampling, name), f"options.sampling.{name}")
    _put_all(knobs, "stop_token_ids", sampling.stop_token_ids, "options.sampling.stop_token_ids")
    _put_all(options, "stop", sampling.stop, "options.stop")
    for name in ("include_stop_str_in_output", "skip_special_tokens"):
        _put(options, name, getattr(sampling, name), f"options.{name}")
    _put(options, "cache_salt", cache_salt, "options.cache_salt")


def _put_messages(target: Any, messages: Sequence[Message], path: str) -> None:
    for index, message in enumerate(_elements(messages, path)):
        if not isinstance(message, Message):
            raise invalid(f"{path}[{index}]", f"must be a message, got {_shown(message)}")
        turn = target.add()
        _put(turn, "role", message.role, f"{path}[{index}].role")
        _put(turn, "content", message.content, f"{path}[{index}].content")


def _put(target: ProtoMessage, name: str, value: object, path: str) -> None:
    """Sets one field, unless the value is None; zero and false are values."""
    if value is None:
        return
    kind = target.DESCRIPTOR.fields_by_name[name].type
    try:
        if not _fits(kind, value):
            raise TypeError(name)
        setattr(target, name, value)
    except (TypeError, ValueError, OverflowError):
        raise invalid(path, f"must be {_WANTED[kind]}, got {_shown(value)}") from None


def _put_all(target: ProtoMessage, name: str, values: Sequence[object], path: str) -> None:
    """Fills one repeated field; a refused element is named by its index."""
    kind = target.DESCRIPTOR.fields_by_name[name].type
    repeated: MutableSequence[Any] = getattr(target, name)
    for index, value in enumerate(_elements(values, path)):
        try:
            if not _fits(kind, value):
                raise TypeError(name)
            repeated.append(value)
        except (TypeError, ValueError, OverflowError):
            wanted = _WANTED[kind]
            raise invalid(f"{path}[{index}]", f"must be {wanted}, got {_shown(value)}") from None


def _fits(kind: int, value: object) -> bool:
    """Stricter than protobuf, which takes bytes for text, 1 for true and true for 1."""
    if kind == FieldDescriptor.TYPE_STRING:
        return isinstance(value, str)
    return isinstance(value, bool) == (kind == FieldDescriptor.TYPE_BOOL)


def _elements(values: Iterable[Element], path: str) -> Iterable[Element]:
    # Text and bytes are sequences too; taken apart they would be a silent error.
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Iterable):
        raise invalid(path, f"must be a list, got {_shown(values)}")
    return values


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
