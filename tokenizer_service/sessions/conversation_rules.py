"""What is wrong with a conversation, its tools and its switches, whatever the template.

Must not know: grpc, protobuf, templates, how a model writes its calls.
"""

import json
import re
from collections.abc import Iterator

from tokenizer_service.engines.refusal import Violation
from tokenizer_service.sessions.request import ConversationPrompt
from tokenizer_service.text.messages import Message, NamedTool, Tool, ToolMode

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TOOL_CALLS = 128  # of one message
MAX_SCHEMA_CHARS = 65_536
MAX_TEMPLATE_CHARS = 65_536
_MAX_ID_CHARS = 256
_MAX_SCHEMAS_CHARS = 1024 * 1024  # of all tools together
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NAME_RULE = "a name has 1 to 64 letters, digits, '_' or '-'"


def conversation_violations(
    prompt: ConversationPrompt, *, allow_chat_template: bool, prefix: str = ""
) -> Iterator[Violation]:
    """`prefix` is the path of the message that holds the conversation's fields ("" or "conversation.")."""
    for violation in _violations(prompt, allow_chat_template):
        yield Violation(prefix + violation.field, violation.description)


def _violations(prompt: ConversationPrompt, allow_chat_template: bool) -> Iterator[Violation]:
    yield from _message_violations(prompt)
    yield from _tool_violations(prompt.tools)
    yield from _choice_violations(prompt)
    yield from _continuation_violations(prompt)
    if prompt.chat_template is not None:
        yield from _template_violations(prompt.chat_template, allow_chat_template)


def _message_violations(prompt: ConversationPrompt) -> Iterator[Violation]:
    if prompt.num_messages == 0:
        yield Violation("messages", "the conversation is empty; at least 1 message is needed")
    if prompt.num_messages > MAX_MESSAGES:
        yield Violation("messages", f"{prompt.num_messages:,} messages exceed the limit of {MAX_MESSAGES:,}")
        return
    for place, message in enumerate(prompt.messages):
        path = f"messages[{place}]"
        if not message.role:
            yield Violation(f"{path}.role", "the role is empty")
        if message.tool_calls or message.tool_call_id is not None or message.name is not None:
            yield from _turn_violations(path, message)


def _turn_violations(path: str, message: Message) -> Iterator[Violation]:
    """Of the fields that few messages have."""
    yield from _too_long(f"{path}.tool_call_id", message.tool_call_id or "")
    yield from _too_long(f"{path}.name", message.name or "")
    if message.tool_calls and message.role != "assistant":
        yield Violation(f"{path}.tool_calls", f"only an assistant makes calls; the role here is {message.role[:64]!r}")
    if len(message.tool_calls) > MAX_TOOL_CALLS:
        yield Violation(f"{path}.tool_calls", f"there are more than {MAX_TOOL_CALLS}")
        return
    for place, call in enumerate(message.tool_calls):
        yield from _too_long(f"{path}.tool_calls[{place}].id", call.id)
        if not _TOOL_NAME.fullmatch(call.name):
            yield Violation(f"{path}.tool_calls[{place}].name", f"{call.name[:64]!r} is no tool's name; {_NAME_RULE}")
        if len(call.arguments) > MAX_SCHEMA_CHARS:
            field = f"{path}.tool_calls[{place}].arguments"
            yield Violation(field, f"{len(call.arguments):,} characters exceed the limit of {MAX_SCHEMA_CHARS:,}")


def _too_long(field: str, text: str) -> Iterator[Violation]:
    if len(text) > _MAX_ID_CHARS:
        yield Violation(field, f"{len(text):,} characters exceed the limit of {_MAX_ID_CHARS}")


def _tool_violations(tools: tuple[Tool, ...]) -> Iterator[Violation]:
    if len(tools) > MAX_TOOLS:
        yield Violation("tools", f"there are more than {MAX_TOOLS}")
        return
    size = sum(len(tool.parameters or "") for tool in tools)
    if size > _MAX_SCHEMAS_CHARS:
        yield Violation("tools", f"{size:,} characters of parameters exceed the limit of {_MAX_SCHEMAS_CHARS:,}")
        return
    seen = dict[str, int]()
    for place, tool in enumerate(tools):
        if not _TOOL_NAME.fullmatch(tool.name):
            yield Violation(f"tools[{place}].name", f"{tool.name[:64]!r} is not allowed; {_NAME_RULE}")
        elif tool.name in seen:
            yield Violation(f"tools[{place}].name", f"{tool.name!r} is also the name of tools[{seen[tool.name]}]")
        seen.setdefault(tool.name, place)
        if tool.parameters is not None:
            yield from _schema_violations(f"tools[{place}].parameters", tool.parameters)


def _schema_violations(field: str, schema: str) -> Iterator[Violation]:
    if len(schema) > MAX_SCHEMA_CHARS:
        yield Violation(field, f"{len(schema):,} characters exceed the limit of {MAX_SCHEMA_CHARS:,}")
        return
    try:
        value = json.loads(schema, parse_constant=_refuse_constant)
    except RecursionError:
        yield Violation(field, "the JSON is nested too deeply")
    except ValueError as error:
        yield Violation(field, f"not valid JSON: {error}"[:200])
    else:
        if not isinstance(value, dict):
            yield Violation(field, "a JSON schema of arguments is a JSON object")
        elif value.get("type", "object") != "object":
            yield Violation(field, 'arguments are an object: the schema\'s type has to be "object"')


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _choice_violations(prompt: ConversationPrompt) -> Iterator[Violation]:
    match prompt.tool_choice:
        case ToolMode.REQUIRED if not prompt.tools:
            yield Violation("tool_choice.mode", "a call is required, but there are no tools")
        case NamedTool(name) if all(tool.name != name for tool in prompt.tools):
            yield Violation("tool_choice.name", f"{name[:64]!r} is none of the {len(prompt.tools)} tools")


def _continuation_violations(prompt: ConversationPrompt) -> Iterator[Violation]:
    if not prompt.continue_final_message:
        return
    if prompt.add_generation_prompt:
        yield Violation("continue_final_message", "excludes add_generation_prompt")
    if prompt.messages and prompt.messages[-1].role != "assistant":
        role = prompt.messages[-1].role[:64]
        yield Violation("continue_final_message", f"only an assistant's turn is continued, the last role is {role!r}")


def _template_violations(template: str, is_allowed: bool) -> Iterator[Violation]:
    if not is_allowed:
        yield Violation("chat_template", "a template of the request's own is not allowed here")
    elif len(template) > MAX_TEMPLATE_CHARS:
        yield Violation("chat_template", f"{len(template):,} characters exceed the limit of {MAX_TEMPLATE_CHARS:,}")
