"""The request of POST /v1/responses (its text part) and the draft that it means.

Must not know: how requests are served.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from tokenizer_service.engines.messages import JsonObject as AnyObject
from tokenizer_service.engines.messages import JsonSchema, SamplingOptions, StructuredOutput
from tokenizer_service.http.errors import FieldNames, HttpError, bad_field
from tokenizer_service.http.fields import Fields, Int64
from tokenizer_service.http.generation_fields import GenerationFields, StreamOptions, check_common
from tokenizer_service.http.structured_fields import JsonObjectFormat, TextFormat, schema_text
from tokenizer_service.http.tool_fields import FunctionFields, ModeName, make_tool
from tokenizer_service.sessions.request import ConversationPrompt
from tokenizer_service.text.messages import Message, NamedTool, ToolCall, ToolChoice, ToolMode

# Items of the input are not the turns of the conversation one by one.
RESPONSE_NAMES = FieldNames(
    {"request_id": "X-Request-Id", "max_tokens": "max_output_tokens"},
    {"messages": "input", "tool_choice.mode": "tool_choice", "structured_output": "text.format"},
)


class InputText(Fields):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(Fields):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[InputText]
    id: str | None = None
    status: str | None = None
    phase: None = None


class CallItem(Fields):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None


class CallOutputItem(Fields):
    type: Literal["function_call_output"]
    call_id: str
    output: str
    id: str | None = None
    status: str | None = None


class SchemaFormat(Fields):
    """`name`, `description` and `strict` change nothing: the schema is always obeyed."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Fields):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None


class FunctionTool(FunctionFields):
    type: Literal["function"]


class FunctionChoice(Fields):
    type: Literal["function"]
    name: str


class ResponseFields(GenerationFields):
    """`store` changes nothing: no answer is kept, so `previous_response_id` cannot be honoured and is refused."""

    input: str | list[MessageItem | CallItem | CallOutputItem]
    instructions: str | None = None
    max_output_tokens: Int64 | None = None
    text: TextOptions | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: ModeName | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    stream_options: StreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    background: Literal[False] | None = None


def response_prompt(fields: ResponseFields) -> ConversationPrompt | HttpError:
    refusal = check_common(fields)
    if refusal is not None:
        return refusal
    if fields.stream_options is not None and not fields.stream:
        return bad_field("stream_options", "may only be set with stream")
    messages = [] if fields.instructions is None else [Message("system", fields.instructions)]
    messages += [Message("user", fields.input)] if isinstance(fields.input, str) else _messages(fields.input)
    return ConversationPrompt(
        messages=tuple(messages),
        num_messages=len(messages),
        add_generation_prompt=True,
        tools=tuple(make_tool(tool) for tool in fields.tools or ()),
        tool_choice=_choice(fields.tool_choice),
        parallel_tool_calls=fields.parallel_tool_calls is not False,
    )


def _messages(items: list[MessageItem | CallItem | CallOutputItem]) -> list[Message]:
    """Calls that follow each other are one assistant's turn, as the model wrote them."""
    messages = list[Message]()
    for item in items:
        match item:
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                messages.append(Message(role, _text(item.content)))
            case CallItem():
                call = ToolCall(item.call_id, item.name, item.arguments)
                last = messages.pop() if messages and messages[-1].role == "assistant" else Message("assistant", "")
                messages.append(Message("assistant", last.content, (*last.tool_calls, call)))
            case CallOutputItem():
                messages.append(Message("tool", item.output, tool_call_id=item.call_id))
    return messages


def _text(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _choice(choice: ModeName | FunctionChoice | None) -> ToolChoice | None:
    if choice is None:
        return None
    return NamedTool(choice.name) if isinstance(choice, FunctionChoice) else ToolMode(choice)


def response_sampling(fields: ResponseFields) -> SamplingOptions:
    """The values of what the API names in its own way."""
    structure: StructuredOutput | None = None
    match fields.text.format if fields.text else None:
        case JsonObjectFormat():
            structure = AnyObject()
        case SchemaFormat(schema_=schema):
            structure = JsonSchema(schema_text(schema))
    return SamplingOptions(max_tokens=fields.max_output_tokens, structured_output=structure)
