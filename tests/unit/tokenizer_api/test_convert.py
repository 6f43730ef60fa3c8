"""Requests as drafts: what a message says, and what it cannot say."""

import pytest

from tokenizer_service.api.convert import chat_draft, generate_draft, tokenize_prompt
from tokenizer_service.sessions.conversation_rules import MAX_MESSAGES, MAX_TOOLS
from tokenizer_service.sessions.request import ConversationPrompt
from tokenizer_service.text.messages import Message, NamedTool, Tool, ToolCall, ToolChoice, ToolMode
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

MESSAGES = [
    pb.ChatMessage(role="user", content="a"),
    pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="c", name="f", arguments="{}")]),
    pb.ChatMessage(role="tool", content="1", tool_call_id="c", name="f"),
]
TOOLS = [pb.Tool(name="f", description="", parameters="{}"), pb.Tool(name="g")]
READ_MESSAGES = (
    Message("user", "a"),
    Message("assistant", "", (ToolCall("c", "f", "{}"),)),
    Message("tool", "1", (), "c", "f"),
)
READ_TOOLS = (Tool("f", "", "{}"), Tool("g", None, None))


def chat_prompt(request: pb.ChatRequest) -> ConversationPrompt:
    prompt = chat_draft(request).prompt
    assert isinstance(prompt, ConversationPrompt)
    return prompt


def test_a_conversation_with_everything() -> None:
    request = pb.ChatRequest(
        messages=MESSAGES, tools=TOOLS, tool_choice={"name": "f"}, continue_final_message=True, chat_template=""
    )
    assert chat_prompt(request) == ConversationPrompt(
        READ_MESSAGES, 3, False, READ_TOOLS, NamedTool("f"), continue_final_message=True, chat_template=""
    )
    plain = pb.TokenizeRequest(
        conversation=pb.Conversation(messages=MESSAGES, tools=TOOLS, continue_final_message=True, chat_template="x")
    )
    assert tokenize_prompt(plain) == ConversationPrompt(
        READ_MESSAGES, 3, False, READ_TOOLS, None, continue_final_message=True, chat_template="x"
    )


@pytest.mark.parametrize(
    ("add", "continues", "opens"),
    [
        (None, None, True),
        (None, False, True),
        (None, True, False),
        (True, None, True),
        (False, None, False),
        (True, True, True),  # refused later
    ],
)
def test_a_turn_is_opened_unless_the_last_one_goes_on(add: bool | None, continues: bool | None, opens: bool) -> None:
    prompt = chat_prompt(pb.ChatRequest(messages=MESSAGES, add_generation_prompt=add, continue_final_message=continues))
    assert (prompt.add_generation_prompt, prompt.continue_final_message) == (opens, bool(continues))


@pytest.mark.parametrize(
    ("choice", "read"),
    [
        (pb.ToolChoice(mode=pb.ToolChoice.MODE_AUTO), ToolMode.AUTO),
        (pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE), ToolMode.NONE),
        (pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED), ToolMode.REQUIRED),
        (pb.ToolChoice(name=""), NamedTool("")),
    ],
)
def test_tool_choices(choice: pb.ToolChoice, read: ToolChoice) -> None:
    draft = chat_draft(pb.ChatRequest(messages=MESSAGES, tool_choice=choice))
    assert isinstance(draft.prompt, ConversationPrompt)
    assert (draft.prompt.tool_choice, draft.misplaced) == (read, ())


def test_of_a_hostile_request_only_what_may_be_served_is_copied() -> None:
    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user")] * (MAX_MESSAGES + 10), tools=[pb.Tool(name="f")] * (MAX_TOOLS + 10)
    )
    prompt = chat_prompt(request)
    assert (len(prompt.messages), prompt.num_messages) == (MAX_MESSAGES, MAX_MESSAGES + 10)
    assert len(prompt.tools) == MAX_TOOLS + 1  # enough to be refused


@pytest.mark.parametrize("priority", [None, 0, -3])
def test_options(priority: int | None) -> None:
    options = pb.GenerationOptions(priority=priority, stop=["x"], cache_salt="s")
    read = generate_draft(pb.GenerateRequest(text="a", options=options)).options
    assert (read.priority, read.stops, read.cache_salt) == (priority, ("x",), "s")
