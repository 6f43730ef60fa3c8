"""Between the library's types and the messages on the wire.

Must not know: channels, calls, statuses. What protobuf would refuse is refused here (see wire), before anything
is sent; ranges are the service's to check.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenwire.common.v1 import health_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client.convert_options import json_text, put_options, sampling_from
from tokenwire_client.errors import invalid
from tokenwire_client.tools import NamedTool, Tool, ToolCall, ToolChoice, ToolMode
from tokenwire_client.types import Health, HealthStatus, Message, Model, Sampling
from tokenwire_client.wire import elements, put, put_all, shown

_HEALTH_STATUS = {
    health_pb2.SERVING_STATUS_SERVING: HealthStatus.SERVING,
    health_pb2.SERVING_STATUS_NOT_SERVING: HealthStatus.NOT_SERVING,
    health_pb2.SERVING_STATUS_SERVICE_UNKNOWN: HealthStatus.SERVICE_UNKNOWN,
}
_TOOL_MODES = {
    ToolMode.AUTO: pb.ToolChoice.MODE_AUTO,
    ToolMode.NONE: pb.ToolChoice.MODE_NONE,
    ToolMode.REQUIRED: pb.ToolChoice.MODE_REQUIRED,
}


@dataclass(frozen=True, slots=True)
class Identity:
    """How a request is named and scheduled."""

    model: str = ""
    request_id: str = ""
    cache_salt: str | None = None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class Rendering:
    """How a conversation becomes a prompt; None is unset."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Sequence[Tool] = ()
    chat_template: str | None = None


def generate_request(
    prompt: str | Sequence[int], sampling: Sampling, identity: Identity, *, add_special_tokens: bool | None
) -> pb.GenerateRequest:
    """A prompt to continue. Raises InvalidRequest for what the wire cannot carry; so do all below."""
    request = pb.GenerateRequest()
    if isinstance(prompt, str):
        put(request, "text", prompt, "text")
    else:
        request.token_ids.SetInParent()
        put_all(request.token_ids, "ids", prompt, "token_ids.ids")
    put(request, "add_special_tokens", add_special_tokens, "add_special_tokens")
    _put_identity(request, sampling, identity)
    return request


def chat_request(
    messages: Sequence[Message],
    sampling: Sampling,
    identity: Identity,
    rendering: Rendering,
    *,
    tool_choice: ToolChoice | None,
    parallel_tool_calls: bool | None = None,
) -> pb.ChatRequest:
    """A conversation to continue; the messages in order, oldest first."""
    request = pb.ChatRequest()
    _put_conversation(request, messages, rendering, "")
    if tool_choice is not None:
        _put_tool_choice(request.tool_choice, tool_choice)
    put(request, "parallel_tool_calls", parallel_tool_calls, "parallel_tool_calls")
    _put_identity(request, sampling, identity)
    return request


def tokenize_request(
    source: str | Sequence[Message], rendering: Rendering, *, model: str, add_special_tokens: bool | None
) -> pb.TokenizeRequest:
    """Text, or messages for the template."""
    request = pb.TokenizeRequest()
    if isinstance(source, str):
        _refuse_rendering(rendering)
        put(request, "text", source, "text")
    else:
        request.conversation.SetInParent()
        _put_conversation(request.conversation, source, rendering, "conversation.")
    put(request, "model", model, "model")
    put(request, "add_special_tokens", add_special_tokens, "add_special_tokens")
    return request


def detokenize_request(
    token_ids: Sequence[int], *, model: str, skip_special_tokens: bool | None
) -> pb.DetokenizeRequest:
    """Ids as given: the service says what is wrong with one out of the vocabulary."""
    request = pb.DetokenizeRequest()
    put_all(request, "token_ids", token_ids, "token_ids")
    put(request, "model", model, "model")
    put(request, "skip_special_tokens", skip_special_tokens, "skip_special_tokens")
    return request


def health_query(service: str) -> health_pb2.HealthQuery:
    """The standard health check's question."""
    query = health_pb2.HealthQuery()
    put(query, "service", service, "service")
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
            default_sampling=sampling_from(each.default_sampling) if each.HasField("default_sampling") else None,
            parent=each.parent,
        )
        for each in answer.models
    )


def _put_identity(request: pb.GenerateRequest | pb.ChatRequest, sampling: Sampling, identity: Identity) -> None:
    put(request, "model", identity.model, "model")
    put(request, "request_id", identity.request_id, "request_id")
    put_options(request.options, sampling, identity.cache_salt, identity.priority)


def _put_conversation(
    target: pb.ChatRequest | pb.Conversation, messages: Sequence[Message], rendering: Rendering, prefix: str
) -> None:
    for index, message in enumerate(elements(messages, f"{prefix}messages")):
        path = f"{prefix}messages[{index}]"
        if not isinstance(message, Message):
            raise invalid(path, f"must be a message, got {shown(message)}")
        _put_message(target.messages.add(), message, path)
    for index, tool in enumerate(elements(rendering.tools, f"{prefix}tools")):
        path = f"{prefix}tools[{index}]"
        if not isinstance(tool, Tool):
            raise invalid(path, f"must be a tool, got {shown(tool)}")
        _put_tool(target.tools.add(), tool, path)
    for name in ("add_generation_prompt", "continue_final_message", "chat_template"):
        put(target, name, getattr(rendering, name), f"{prefix}{name}")


def _put_message(turn: pb.ChatMessage, message: Message, path: str) -> None:
    for name in ("role", "content", "tool_call_id", "name"):
        put(turn, name, getattr(message, name), f"{path}.{name}")
    for index, call in enumerate(elements(message.tool_calls, f"{path}.tool_calls")):
        call_path = f"{path}.tool_calls[{index}]"
        if not isinstance(call, ToolCall):
            raise invalid(call_path, f"must be a tool call, got {shown(call)}")
        target: Any = turn.tool_calls.add()
        for name in ("id", "name", "arguments"):
            put(target, name, getattr(call, name), f"{call_path}.{name}")


def _put_tool(target: pb.Tool, tool: Tool, path: str) -> None:
    put(target, "name", tool.name, f"{path}.name")
    put(target, "description", tool.description, f"{path}.description")
    field = f"{path}.parameters"
    put(target, "parameters", json_text(tool.parameters, field), field)


def _put_tool_choice(target: pb.ToolChoice, choice: ToolChoice) -> None:
    match choice:
        case NamedTool(name):
            put(target, "name", name, "tool_choice.name")
        case ToolMode():
            target.mode = _TOOL_MODES[choice]
        case _:
            raise invalid("tool_choice", f"must be a ToolMode or NamedTool, got {shown(choice)}")


def _refuse_rendering(rendering: Rendering) -> None:
    """Text has no template."""
    for name in ("add_generation_prompt", "continue_final_message", "chat_template"):
        if getattr(rendering, name) is not None:
            raise invalid(f"conversation.{name}", "is for messages, and the input is text")
    if rendering.tools:
        raise invalid("conversation.tools", "is for messages, and the input is text")
