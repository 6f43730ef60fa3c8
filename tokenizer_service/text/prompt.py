"""A conversation to the token ids of its prompt, in one call.

Must not know: gRPC, requests, how many tokens the model takes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tokenizer_service.text.chat_template import ChatTemplate
from tokenizer_service.text.errors import TextError, check_unicode
from tokenizer_service.text.literals import LiteralGuard
from tokenizer_service.text.messages import Message
from tokenizer_service.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ChatLimits:
    """Bounds of one conversation; `max_chars` holds for all messages together and for the rendered prompt."""

    max_messages: int
    max_chars: int


class ChatPrompts:
    """Makes chat prompts for one model; safe for many threads.

    The policy for special tokens: only the template writes them. Special-token text inside a message (or a
    role) stays what it is, text, and the model sees it as ordinary tokens.
    """

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate, limits: ChatLimits) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._limits = limits
        self._guard = LiteralGuard(tokenizer)

    @classmethod
    def load(
        cls,
        folder: Path,
        tokenizer: TextTokenizer,
        limits: ChatLimits,
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> "ChatPrompts":
        """Raises TextError: on "messages" for a model without a chat template, on None for a bad one."""
        template = ChatTemplate.load(folder, tokenizer.named_special_tokens, now=now)
        return cls(tokenizer, template, limits)

    def encode(self, messages: Sequence[Message], add_generation_prompt: bool) -> list[int]:
        """The prompt's ids; for messages without special-token text those of transformers'
        `apply_chat_template`.

        Raises TextError on "messages" or "messages[i].content" (or ".role"); on None when the tokenizer
        fails.
        """
        self._check(messages)
        marked = [Message(self._guard.mark(turn.role), self._guard.mark(turn.content)) for turn in messages]
        is_marked = marked != list(messages)
        if is_marked:
            self._check_markable(messages)
        rendered = self._template.render(marked, add_generation_prompt, max_chars=self._limits.max_chars)
        return self._guard.encode(rendered, is_marked=is_marked, field="messages")

    def _check_markable(self, messages: Sequence[Message]) -> None:
        for place, turn in enumerate(messages):
            self._guard.check_markable(turn.role, f"messages[{place}].role")
            self._guard.check_markable(turn.content, f"messages[{place}].content")

    def _check(self, messages: Sequence[Message]) -> None:
        limits = self._limits
        if not messages:
            raise TextError("messages", "a conversation has at least one message")
        if len(messages) > limits.max_messages:
            message = f"{len(messages):,} messages exceed the limit of {limits.max_messages:,}"
            raise TextError("messages", message)
        size = sum(len(turn.role) + len(turn.content) for turn in messages)
        if size > limits.max_chars:
            message = f"the messages' {size:,} characters exceed the limit of {limits.max_chars:,}"
            raise TextError("messages", message)
        for place, turn in enumerate(messages):
            if not turn.role:
                raise TextError(f"messages[{place}].role", "is empty")
            check_unicode(f"messages[{place}].role", turn.role)
            check_unicode(f"messages[{place}].content", turn.content)
