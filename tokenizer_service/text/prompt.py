"""A conversation to the token ids of its prompt, in one call.

Must not know: gRPC, requests, how many tokens the model takes.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizer_service.text.chat_template import ChatTemplate
from tokenizer_service.text.errors import TextError, check_unicode
from tokenizer_service.text.literals import LiteralGuard
from tokenizer_service.text.messages import Message, Tool
from tokenizer_service.text.template_data import Data, map_strings, message_data, strings_in, tool_data
from tokenizer_service.text.tokenizer import TextTokenizer
from tokenizer_service.text.tool_formats import ToolFormat, detect_format
from tokenizer_service.text.tool_turns import with_tools, with_written_turns

_CACHED_TEMPLATES = 16  # of clients' own


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """Bounds of one conversation; `max_chars` holds for messages and tools together and for the rendered prompt."""

    max_messages: int
    max_chars: int


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """A model's templates: `for_tools` is used where there are tools (None: there is no other one)."""

    default: ChatTemplate
    for_tools: ChatTemplate | None = None

    @property
    def last(self) -> ChatTemplate:
        """The one for conversations with tools."""
        return self.for_tools or self.default


class ChatPrompts:
    """Makes chat prompts for one model; safe for many threads.

    The policy for special tokens: only the template writes them. Special-token text inside a message, a role,
    a tool or the arguments of a call stays what it is, text, and the model sees it as ordinary tokens.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        template: ChatTemplate,
        limits: ChatLimits,
        *,
        for_tools: ChatTemplate | None = None,
        tool_format: ToolFormat | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`tool_format` None: what the model's template and vocabulary show (see tool_formats)."""
        self._tokenizer = tokenizer
        self._templates = ChatTemplates(template, for_tools)
        self._limits = limits
        self._guard = LiteralGuard(tokenizer)
        self._now = now
        self._compiled = functools.lru_cache(_CACHED_TEMPLATES)(self._compile)
        self.tool_format = tool_format or self._detect_format()

    @classmethod
    def load(
        cls,
        folder: Path,
        tokenizer: TextTokenizer,
        limits: ChatLimits,
        *,
        tool_format: ToolFormat | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> "ChatPrompts":
        """Raises TextError: on "messages" for a model without a chat template, on None for a bad one."""
        special = tokenizer.named_special_tokens
        template = ChatTemplate.load(folder, special, now=now)
        for_tools = ChatTemplate.load_for_tools(folder, special, now=now)
        return cls(tokenizer, template, limits, for_tools=for_tools, tool_format=tool_format, now=now)

    def encode(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool,
        *,
        tools: Sequence[Tool] = (),
        continue_final_message: bool = False,
        chat_template: str | None = None,
    ) -> list[int]:
        """The prompt's ids; for messages without special-token text those of transformers'
        `apply_chat_template`. `chat_template`: used instead of the model's.

        Raises TextError on "messages", "messages[i].content" (or another field of a message), "tools",
        "tools[i].parameters", "chat_template" or "continue_final_message"; on None when the tokenizer fails.
        """
        self._check(messages, tools)
        template = self._template(bool(tools), chat_template)
        turns, shown = message_data(messages), tool_data(tools)
        marked, marked_tools = self._mark(turns), self._mark(shown)
        is_marked = marked != turns or marked_tools != shown
        if is_marked:
            self._check_markable(turns, shown)
        rendered = self._render(template, marked, marked_tools, add_generation_prompt, continue_final_message)
        return self._guard.encode(rendered, is_marked=is_marked, field="messages")

    def _render(
        self, template: ChatTemplate, turns: list[Data], tools: list[Data], opens_turn: bool, continues: bool
    ) -> str:
        """What the template does not know of tools is written into the turns."""
        if not template.knows_calls and any("tool_calls" in turn or turn["role"] == "tool" for turn in turns):
            turns = with_written_turns(turns, self.tool_format)
        if tools and not template.knows_tools:
            if self.tool_format is ToolFormat.NONE:
                raise TextError("tools", "this model takes no tools")
            turns = with_tools(turns, tools, self.tool_format)
        return template.render(
            turns,
            opens_turn,
            max_chars=self._limits.max_chars,
            tools=tools or None,
            continue_final_message=continues,
        )

    def _template(self, has_tools: bool, source: str | None) -> ChatTemplate:
        if source is not None:
            return self._compiled(source)
        return self._templates.last if has_tools else self._templates.default

    def _compile(self, source: str) -> ChatTemplate:
        check_unicode("chat_template", source)
        return ChatTemplate(source, self._tokenizer.named_special_tokens, now=self._now, field="chat_template")

    def _detect_format(self) -> ToolFormat:
        def has_token(token: str) -> bool:
            return self._tokenizer.token_id(token) is not None

        template = self._templates.last
        return detect_format([template.source], template.knows_tools, has_token)

    def _mark(self, data: list[Data]) -> list[Data]:
        marked: list[Data] = map_strings(data, self._guard.mark) if data else []
        return marked

    def _check_markable(self, turns: Sequence[Data], tools: Sequence[Data]) -> None:
        for place, turn in enumerate(turns):
            for field, value in turn.items():
                self._check_strings(value, f"messages[{place}].{field}")
        for place, tool in enumerate(tools):
            self._check_strings(tool, f"tools[{place}]")

    def _check_strings(self, value: Any, field: str) -> None:
        for text in strings_in(value):
            self._guard.check_markable(text, field)

    def _check(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        limits = self._limits
        if not messages:
            raise TextError("messages", "a conversation has at least one message")
        if len(messages) > limits.max_messages:
            message = f"{len(messages):,} messages exceed the limit of {limits.max_messages:,}"
            raise TextError("messages", message)
        size = _size(messages)
        if size > limits.max_chars:
            message = f"the messages' {size:,} characters exceed the limit of {limits.max_chars:,}"
            raise TextError("messages", message)
        size += sum(len(tool.name) + len(tool.description or "") + len(tool.parameters or "") for tool in tools)
        if size > limits.max_chars:
            raise TextError("tools", f"with them, {size:,} characters exceed the limit of {limits.max_chars:,}")
        for place, turn in enumerate(messages):
            if not turn.role:
                raise TextError(f"messages[{place}].role", "is empty")
            check_unicode(f"messages[{place}].role", turn.role)
            check_unicode(f"messages[{place}].content", turn.content)


def _size(messages: Iterable[Message]) -> int:
    """Characters of all that may be in the prompt."""
    return sum(
        len(turn.role)
        + len(turn.content)
        + len(turn.name or "")
        + len(turn.tool_call_id or "")
        + sum(len(call.name) + len(call.id) + len(call.arguments) for call in turn.tool_calls)
        for turn in messages
    )
