"""What the reader of a generation sees: text as it comes, then exactly one end.

Must not know: grpc, protobuf, engines.
"""

from dataclasses import dataclass
from typing import TypeAlias

from tokenizer_service.engines.messages import FinishReason, Usage
from tokenizer_service.engines.refusal import Refusal


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A token, its own bytes (a part of a character for some) and its natural log probability."""

    token_id: int
    token: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TextPositionLogprobs:
    """Log probabilities at one position; `token` is None for the first prompt token, `rank` 1 is the most likely."""

    token: TextLogprob | None
    rank: int
    top: tuple[TextLogprob, ...]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """New part of a tool call; the first one of a call (`index` in the turn) has its id and name."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of a sample and the tokens that arrived with it; one of them may be empty.

    The log probabilities are one entry for each of `token_ids`, empty unless asked for; those of the prompt
    come once, for sample 0. Text of tool calls is in `tool_calls` only.
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0
    logprobs: tuple[TextPositionLogprobs, ...] = ()
    prompt_logprobs: tuple[TextPositionLogprobs, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Completed:
    """The end of a sample that was served. `stop_token_id` is None for a plain end of sequence."""

    reason: FinishReason
    usage: Usage
    stop_string: str | None
    stop_token_id: int | None
    seed: int
    index: int = 0
    has_tool_calls: bool = False


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of one that was not."""

    refusal: Refusal


TextEvent: TypeAlias = TextDelta | Completed | Failed
