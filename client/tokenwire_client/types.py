"""What the client library takes and gives: plain frozen data.

Must not know: grpc, protobuf, the services.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why a generation ended."""

    STOP = "stop"  # end of sequence, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context limit
    ABORT = "abort"  # ended from outside
    ERROR = "error"  # this request failed


class HealthStatus(Enum):
    """Answer of the standard gRPC health check."""

    SERVING = "serving"
    NOT_SERVING = "not_serving"
    SERVICE_UNKNOWN = "service_unknown"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Health:
    """State of a server, or of one of its services."""

    status: HealthStatus

    @property
    def serving(self) -> bool:
        return self.status is HealthStatus.SERVING


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is what the model's template knows ("system", "user", ...)."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request is sampled. None means unset: the service's default, never zero.

    Ranges are those of the service, which refuses what is outside: `temperature` >= 0 (0 is greedy),
    `top_p` in (0, 1], `min_p` in [0, 1], `seed` any int64, at most 64 `stop` strings. An empty `stop` or
    `stop_token_ids` is the same as unset.
    """

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None


DEFAULT_SAMPLING = Sampling()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `cached_tokens` are prompt tokens taken from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text (whole characters) and the tokens that arrived with it; the text may lag behind the tokens."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished generation: all of its text and tokens, and how it ended.

    `stop_string` or `stop_token_id` is set when one of them, and not a plain end of sequence, stopped it.
    `seed` is the one that was used, given or not.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    stop_string: str | None
    stop_token_id: int | None
    seed: int
    request_id: str


@dataclass(frozen=True, slots=True)
class Model:
    """A served model. `max_model_len` is prompt + completion, in tokens."""

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    connected_engines: int
