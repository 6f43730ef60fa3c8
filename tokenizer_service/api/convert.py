"""From the clients' protobuf messages to the plain data of this service.

Must not know: how requests are served, which values are good. What a message can say and plain data cannot (an
empty choice) is kept as a violation of the draft.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

from tokenizer_service.engines.refusal import Violation
from tokenizer_service.engines.sampling_wire import sampling_options
from tokenizer_service.sessions.conversation_rules import MAX_MESSAGES, MAX_TOOL_CALLS, MAX_TOOLS
from tokenizer_service.sessions.request import (
    ConversationPrompt,
    GenerationOptions,
    IdsPrompt,
    Prompt,
    RequestDraft,
    TextPrompt,
)
from tokenizer_service.text.messages import Message, NamedTool, Tool, ToolCall, ToolChoice, ToolMode
from tokenwire.common.v1 import sampling_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2

_Switched: TypeAlias = (
    tokenizer_pb2.GenerateRequest
    | tokenizer_pb2.ChatRequest
    | tokenizer_pb2.TokenizeRequest
    | tokenizer_pb2.Conversation
    | tokenizer_pb2.DetokenizeRequest
    | tokenizer_pb2.GenerationOptions
)
_TOOL_MODES = {
    tokenizer_pb2.ToolChoice.MODE_AUTO: ToolMode.AUTO,
    tokenizer_pb2.ToolChoice.MODE_NONE: ToolMode.NONE,
    tokenizer_pb2.ToolChoice.MODE_REQUIRED: ToolMode.REQUIRED,
}
_CONSTRAINTS = "json_schema, json_object, regex, grammar and choice"


def generate_draft(request: tokenizer_pb2.GenerateRequest) -> RequestDraft:
    prompt: Prompt | None = None
    misplaced: tuple[Violation, ...] = ()
    match request.WhichOneof("prompt"):
        case "text":
            prompt = TextPrompt(request.text, _unless_unset(request, "add_special_tokens", True))
        case "token_ids":
            prompt = IdsPrompt(tuple(request.token_ids.ids))
            misplaced = misplaced_special_tokens(request, "token_ids")
    misplaced += tuple(_unsayable(request.options))
    return RequestDraft(request.model, request.request_id, prompt, _options(request.options), misplaced)


def misplaced_special_tokens(
    request: tokenizer_pb2.GenerateRequest | tokenizer_pb2.TokenizeRequest, instead: str
) -> tuple[Violation, ...]:
    """`add_special_tokens` belongs to `text`; set beside `instead` it would be ignored."""
    if not request.HasField("add_special_tokens"):
        return ()
    return (Violation("add_special_tokens", f"has no meaning with {instead}; it may only be set with text"),)


def chat_draft(request: tokenizer_pb2.ChatRequest) -> RequestDraft:
    choice: ToolChoice | None = None
    misplaced = list(_unsayable(request.options))
    if request.HasField("tool_choice"):
        choice = _tool_choice(request.tool_choice)
        if choice is None:
            misplaced.append(Violation("tool_choice", "nothing is chosen: set mode (auto, none or required) or name"))
    is_parallel = _unless_unset(request, "parallel_tool_calls", True)
    prompt = replace(_conversation(request, choice), parallel_tool_calls=is_parallel)
    return RequestDraft(request.model, request.request_id, prompt, _options(request.options), tuple(misplaced))


def tokenize_prompt(request: tokenizer_pb2.TokenizeRequest) -> Prompt | None:
    """None when the client gave neither text nor conversation."""
    match request.WhichOneof("input"):
        case "text":
            return TextPrompt(request.text, _unless_unset(request, "add_special_tokens", True))
        case "conversation":
            return _conversation(request.conversation, None)
    return None


def skips_special_tokens(request: tokenizer_pb2.DetokenizeRequest) -> bool:
    return _unless_unset(request, "skip_special_tokens", True)


def _unless_unset(message: _Switched, field: str, default: bool) -> bool:
    return bool(getattr(message, field)) if message.HasField(field) else default  # type: ignore[arg-type]


def _conversation(
    request: tokenizer_pb2.ChatRequest | tokenizer_pb2.Conversation, choice: ToolChoice | None
) -> ConversationPrompt:
    """Of a hostile number of messages or tools only those are copied that may be served, and one more."""
    continues = _unless_unset(request, "continue_final_message", False)
    return ConversationPrompt(
        messages=tuple(_message(message) for message in request.messages[:MAX_MESSAGES]),
        num_messages=len(request.messages),
        add_generation_prompt=_unless_unset(request, "add_generation_prompt", not continues),
        tools=tuple(_tool(tool) for tool in request.tools[: MAX_TOOLS + 1]),
        tool_choice=choice,
        continue_final_message=continues,
        chat_template=request.chat_template if request.HasField("chat_template") else None,
    )


def _message(message: tokenizer_pb2.ChatMessage) -> Message:
    calls: Sequence[tokenizer_pb2.ToolCall] = message.tool_calls
    return Message(
        role=message.role,
        content=message.content,
        tool_calls=tuple(ToolCall(call.id, call.name, call.arguments) for call in calls[: MAX_TOOL_CALLS + 1]),
        tool_call_id=message.tool_call_id if message.HasField("tool_call_id") else None,
        name=message.name if message.HasField("name") else None,
    )


def _tool(tool: tokenizer_pb2.Tool) -> Tool:
    return Tool(
        name=tool.name,
        description=tool.description if tool.HasField("description") else None,
        parameters=tool.parameters if tool.HasField("parameters") else None,
    )


def _tool_choice(choice: tokenizer_pb2.ToolChoice) -> ToolChoice | None:
    """None for a choice that says nothing, or nothing known."""
    match choice.WhichOneof("choice"):
        case "mode":
            return _TOOL_MODES.get(choice.mode)
        case "name":
            return NamedTool(choice.name)
    return None


def _options(options: tokenizer_pb2.GenerationOptions) -> GenerationOptions:
    return GenerationOptions(
        sampling=sampling_options(options.sampling),
        stops=tuple(options.stop),
        include_stop=_unless_unset(options, "include_stop_str_in_output", False),
        skip_special_tokens=_unless_unset(options, "skip_special_tokens", True),
        cache_salt=options.cache_salt if options.HasField("cache_salt") else None,
        priority=options.priority if options.HasField("priority") else None,
    )


def _unsayable(options: tokenizer_pb2.GenerationOptions) -> Iterator[Violation]:
    params: sampling_pb2.SamplingParams = options.sampling
    if not params.HasField("structured_output"):
        return
    output, path = params.structured_output, "options.sampling.structured_output"
    match output.WhichOneof("constraint"):
        case None:
            yield Violation(path, f"no constraint is given: set one of {_CONSTRAINTS}")
        case "json_object" if not output.json_object:
            yield Violation(f"{path}.json_object", "is false; leave structured_output unset for free text")
