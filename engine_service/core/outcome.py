"""How requests end: finish reasons, refusals, and the news of a request after a step.

Must not know: gRPC, protobuf, torch. A refusal is a value, never an exception.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RefusalCode(Enum):
    """Why a request is not (any longer) served; `api/errors.py` maps each to one gRPC status."""

    INVALID = "invalid"  # the client's mistake
    TOO_LARGE = "too_large"  # over a size limit of the transport
    QUEUE_FULL = "queue_full"  # try again later
    SLOW_READER = "slow_reader"  # its unread output passed the limit
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    TOO_LATE = "too_late"  # its deadline would pass before its first token
    SHUTTING_DOWN = "shutting_down"  # another replica may serve it
    ENGINE_GONE = "engine_gone"
    DUPLICATE = "duplicate"  # a live request has this id
    UNKNOWN_ADAPTER = "unknown_adapter"  # this engine has none of that name, or another content
    FAILED = "failed"  # this request's own failure


@dataclass(frozen=True, slots=True)
class Refusal:
    """A reason in words for the client: numbers yes; paths, class names and tracebacks no."""

    code: RefusalCode
    message: str
    field: str | None = None
    retry_after_s: float | None = None


NO_GRAMMARS = Refusal(
    RefusalCode.INVALID,
    "structured output is not available: the model has no tokenizer that grammars can use",
    "request.sampling.structured_output",
)


NO_ADAPTERS = Refusal(RefusalCode.UNKNOWN_ADAPTER, "this engine serves no adapters", "adapter")


@dataclass(frozen=True, slots=True)
class Finish:
    """The last word on a request. `completion_tokens` counts every sampled token, a stop token included."""

    reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stop_token_id: int | None = None
    error: Refusal | None = None


class PositionLogprobs(NamedTuple):
    """Natural log probabilities at one position, by the model's own logits.

    `token` is (id, log probability) of the token there, None for the first prompt token; `rank` is 1 for the
    most likely one. `top` are the most likely tokens, the best first, equal ones by id.
    """

    token: tuple[int, float] | None
    rank: int
    top: tuple[tuple[int, float], ...]


class RequestNews(NamedTuple):
    """New tokens of one request since its last news, and its end if it came. (A named tuple: see Chunk.)

    `logprobs`: one entry for each of `token_ids`, when asked for. `prompt_logprobs`: one for each prompt token,
    once, when asked for. `cached_tokens`: prompt tokens found in the cache, told with the first token; 0 afterwards.
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish: Finish | None = None
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    cached_tokens: int = 0
