"""What the reader of a generation sees: text as it comes, then exactly one end.

Must not know: grpc, protobuf, engines.
"""

from dataclasses import dataclass
from typing import TypeAlias

from tokenizer_service.engines.messages import FinishReason, Usage
from tokenizer_service.engines.refusal import Refusal


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text and the tokens that arrived with it; one of them may be empty."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completed:
    """The end of a generation that was served. `stop_token_id` is None for a plain end of sequence."""

    reason: FinishReason
    usage: Usage
    stop_string: str | None
    stop_token_id: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The end of one that was not."""

    refusal: Refusal


TextEvent: TypeAlias = TextDelta | Completed | Failed
