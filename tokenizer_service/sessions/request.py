"""A client's generation request: the draft as it came, and the validated form for everything downstream.

Must not know: grpc, protobuf, the tokenizer, engines' addresses.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from tokenizer_service.engines.messages import SamplingOptions
from tokenizer_service.engines.refusal import Violation
from tokenizer_service.text.messages import Message, Tool, ToolChoice


@dataclass(frozen=True, slots=True)
class TextPrompt:
    FIELD: ClassVar[str] = "text"
    text: str
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    FIELD: ClassVar[str] = "token_ids.ids"
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConversationPrompt:
    """`num_messages` is what the client sent; of too many, only the first are in `messages`.

    `tool_choice` None: the model may call where there are tools; without `parallel_tool_calls` at most once in a turn.
    `chat_template` replaces the model's own,
    where the operator allows it.
    """

    FIELD: ClassVar[str] = "messages"
    messages: tuple[Message, ...]
    num_messages: int
    add_generation_prompt: bool
    tools: tuple[Tool, ...] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None


Prompt: TypeAlias = TextPrompt | IdsPrompt | ConversationPrompt


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """How to generate and which text to show."""

    sampling: SamplingOptions
    stops: tuple[str, ...]
    include_stop: bool
    skip_special_tokens: bool
    cache_salt: str | None
    priority: int | None = None


@dataclass(frozen=True, slots=True)
class RequestDraft:
    """What the client sent, unchecked; only `validation.validate_request` reads it.

    `misplaced`: fields that are set but mean nothing in this request.
    """

    model: str
    request_id: str
    prompt: Prompt | None
    options: GenerationOptions
    misplaced: tuple[Violation, ...] = ()


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A generation request in which every field is in range.

    `deadline` is a reading of the event loop's clock (seconds), None for no deadline. `weight` is the part of a busy
    engine that `tenant` has. `adapter` changes the model for it; empty: none.
    """

    request_id: str
    prompt: Prompt
    options: GenerationOptions
    deadline: float | None
    tenant: str = ""
    weight: int = 1
    adapter: str = ""
