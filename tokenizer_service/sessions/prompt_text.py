"""Prompts to ids and ids to text with one model's tokenizer and chat template; slow calls, made in threads.

Must not know: threads, engines' addresses, clients.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizer_service.engines.messages import ModelInfo
from tokenizer_service.engines.refusal import Refusal, RefusalCode, invalid_field
from tokenizer_service.sessions.request import ConversationPrompt, IdsPrompt, Prompt, TextPrompt
from tokenizer_service.text.detokenizer import Detokenizer
from tokenizer_service.text.errors import TextError
from tokenizer_service.text.messages import ToolMode
from tokenizer_service.text.prompt import ChatLimits, ChatPrompts
from tokenizer_service.text.tokenizer import TextTokenizer
from tokenizer_service.text.tool_formats import MARKERS, ToolFormat


class PromptRefused(Exception):
    """This text cannot be served. Raised across the thread boundary, a value on both sides of it."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class PromptEncoder:
    """`chat` is None for a model without a chat template. Used by many threads."""

    def __init__(self, tokenizer: TextTokenizer, chat: ChatPrompts | None) -> None:
        self._tokenizer = tokenizer
        self._chat = chat
        marker_ids = {tokenizer.token_id(marker) for marker in MARKERS[self.tool_format]}
        self.tool_marker_ids = frozenset(marker for marker in marker_ids if marker is not None)

    @classmethod
    def load(cls, folder: Path, chat_limits: ChatLimits, *, tool_format: ToolFormat | None = None) -> "PromptEncoder":
        """Reads a model folder. `tool_format` None: what the model shows.

        Raises TextError when its tokenizer or its template cannot be used.
        """
        tokenizer = TextTokenizer.load(folder)
        try:
            chat = ChatPrompts.load(folder, tokenizer, chat_limits, tool_format=tool_format)
        except TextError as error:
            if error.field is None:
                raise
            chat = None
        return cls(tokenizer, chat)

    @property
    def vocab_size(self) -> int:
        return self._tokenizer.vocab_size

    @property
    def tool_format(self) -> ToolFormat:
        """How calls are written in this model's text."""
        return ToolFormat.NONE if self._chat is None else self._chat.tool_format

    def encode(self, prompt: Prompt, model: ModelInfo | None) -> list[int]:
        """The prompt's ids. Raises PromptRefused; with `model` also for a text that can never fit."""
        try:
            match prompt:
                case IdsPrompt(token_ids):
                    return list(token_ids)
                case TextPrompt(text, add_special_tokens):
                    self._check_size(prompt.FIELD, len(text.encode(errors="surrogatepass")), model)
                    return self._tokenizer.encode(text, add_special_tokens, field=prompt.FIELD)
                case ConversationPrompt():
                    return self._encode_conversation(prompt, model)
        except TextError as error:
            raise PromptRefused(_refusal(error)) from error

    def _encode_conversation(self, prompt: ConversationPrompt, model: ModelInfo | None) -> list[int]:
        if self._chat is None:
            raise TextError(prompt.FIELD, "this model has no chat template; send a plain prompt instead")
        size = sum(len(message.content.encode(errors="surrogatepass")) for message in prompt.messages)
        self._check_size(prompt.FIELD, size, model)
        return self._chat.encode(
            prompt.messages,
            prompt.add_generation_prompt,
            tools=() if prompt.tool_choice is ToolMode.NONE else prompt.tools,
            continue_final_message=prompt.continue_final_message,
            chat_template=prompt.chat_template,
        )

    def _check_size(self, field: str, size: int, model: ModelInfo | None) -> None:
        """Even if every token were the vocabulary's longest, `size` bytes must fit the context."""
        if model is None:
            return
        limit = self._tokenizer.longest_token_bytes * model.max_model_len
        if size > limit:
            raise TextError(
                field,
                f"{size:,} bytes exceed the {limit:,} that max_model_len {model.max_model_len:,} can hold",
            )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Raises PromptRefused for an id without meaning."""
        try:
            return self._tokenizer.decode(token_ids, skip_special_tokens)
        except TextError as error:
            raise PromptRefused(_refusal(error)) from error

    def token_bytes(self, token_id: int) -> bytes:
        """A token's own bytes (see TextTokenizer)."""
        return self._tokenizer.token_bytes(token_id)

    def new_detokenizer(
        self, prompt_ids: Sequence[int], skip_special_tokens: bool, shown_ids: frozenset[int] = frozenset()
    ) -> Detokenizer:
        """`shown_ids` are not skipped, though they are special."""
        return self._tokenizer.new_detokenizer(prompt_ids, skip_special_tokens, shown_ids)


def _refusal(error: TextError) -> Refusal:
    if error.field is None:
        return Refusal(RefusalCode.INTERNAL, error.message)
    return invalid_field(error.field, error.message)
