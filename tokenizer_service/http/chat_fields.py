"""The request of POST /v1/chat/completions and the drafts that it means.

Must not know: how requests are served.
"""

from typing import Any, Literal

from tokenizer_service.engines.messages import SamplingOptions
from tokenizer_service.http.errors import FieldNames, HttpError, bad_field
from tokenizer_service.http.fields import Fields, Int64
from tokenizer_service.http.generation_fields import SampledFields, check_sampled
from tokenizer_service.http.structured_fields import structured_output
from tokenizer_service.http.tool_fields import (
    ModeName,
    NamedChoice,
    ToolCallFields,
    ToolFields,
    make_choice,
)
from tokenizer_service.sessions.conversation_rules import MAX_MESSAGES
from tokenizer_service.sessions.request import ConversationPrompt
from tokenizer_service.text.messages import Message

CHAT_NAMES = FieldNames({"request_id": "X-Request-Id"}, {"tool_choice.mode": "tool_choice"}, wraps_functions=True)


class TextPart(Fields):
    type: Literal["text"]
    text: str


class MessageFields(Fields):
    """One turn. An answer's message may be sent back as it came: `refusal` and the like must then be null."""

    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCallFields] | None = None
    tool_call_id: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    reasoning_content: None = None
    reasoning: None = None

    def as_message(self) -> Message:
        calls = tuple(call.as_call() for call in self.tool_calls or ())
        # OpenAI's newer name of the system's turn, which few templates know.
        role = "system" if self.role == "developer" else self.role
        return Message(role, joined_text(self.content), calls, self.tool_call_id, self.name)


def joined_text(content: str | list[TextPart] | None) -> str:
    """Parts follow each other with a line break between them."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


class TemplateFields(Fields):
    """What shapes the prompt of a conversation; common to chat and tokenize."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template: str | None = None
    tools: list[ToolFields] | None = None


class ChatFields(SampledFields, TemplateFields):
    messages: list[MessageFields]
    max_tokens: Int64 | None = None
    max_completion_tokens: Int64 | None = None
    logprobs: bool = False
    top_logprobs: Int64 | None = None
    tool_choice: ModeName | NamedChoice | None = None
    parallel_tool_calls: bool | None = None


def conversation(messages: list[MessageFields], fields: TemplateFields, **more: Any) -> ConversationPrompt:
    opens = fields.add_generation_prompt
    return ConversationPrompt(
        messages=tuple(message.as_message() for message in messages[:MAX_MESSAGES]),
        num_messages=len(messages),
        add_generation_prompt=not fields.continue_final_message if opens is None else opens,
        tools=tuple(tool.as_tool() for tool in fields.tools or ()),
        continue_final_message=fields.continue_final_message,
        chat_template=fields.chat_template,
        **more,
    )


def check_messages(messages: list[MessageFields]) -> HttpError | None:
    """A turn without content is one that calls tools."""
    for place, message in enumerate(messages):
        if message.content is None and not (message.role == "assistant" and message.tool_calls):
            return bad_field(f"messages[{place}].content", "is required")
        if message.annotations:
            return bad_field(f"messages[{place}].annotations", "is not supported")
    return None


def chat_prompt(fields: ChatFields) -> ConversationPrompt | HttpError:
    refusal = check_sampled(fields) or check_messages(fields.messages) or _check_together(fields)
    if refusal is not None:
        return refusal
    choice, is_parallel = make_choice(fields.tool_choice), fields.parallel_tool_calls is not False
    return conversation(fields.messages, fields, tool_choice=choice, parallel_tool_calls=is_parallel)


def _check_together(fields: ChatFields) -> HttpError | None:
    if fields.top_logprobs is not None and not fields.logprobs:
        return bad_field("top_logprobs", "may only be set with logprobs")
    if fields.max_tokens is not None and fields.max_completion_tokens not in (None, fields.max_tokens):
        return bad_field("max_tokens", f"{fields.max_tokens} differs from max_completion_tokens")
    return None


def chat_sampling(fields: ChatFields) -> tuple[FieldNames, SamplingOptions] | HttpError:
    """The API's own names of the fields, and the values of those that it names in its own way."""
    structure = structured_output(fields)
    if isinstance(structure, HttpError):
        return structure
    limit = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    names = CHAT_NAMES.beside({"max_tokens": limit, "logprobs": "top_logprobs"}).with_structure(structure[0])
    return names, SamplingOptions(
        max_tokens=fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens,
        logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
        prompt_logprobs=fields.prompt_logprobs,
        n=fields.n,
        structured_output=structure[1],
    )
