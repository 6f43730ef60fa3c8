"""What the reader of a generation sees: text as it comes, then exactly one end of each sample.

Must not know: grpc, protobuf, engines.
"""

from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from tokenizer_service.engines.messages import FinishReason, Usage
from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.text.messages import ToolCallDelta as ToolCallDelta


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


class TextDelta(NamedTuple):
    """New text of a sample and the tokens that it completes; one of them may be empty.

    The log probabilities are one entry for each of `token_ids`, empty unless asked for; those of the prompt
    come for sample 0, in one or more parts. Text of tool calls is in `tool_calls` only. (A named tuple: one is
    made for each token, and a frozen dataclass takes several times as long.)
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody needs
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
    """The end of all samples that have not ended: the request could not be served."""

    refusal: Refusal


TextEvent: TypeAlias = TextDelta | Completed | Failed
