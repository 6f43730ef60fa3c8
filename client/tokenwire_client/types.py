"""What the client library takes and gives: plain frozen data.

Must not know: grpc, protobuf, the services.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from tokenwire_client.structured import StructuredOutput
from tokenwire_client.tools import ToolCall, ToolCallDelta


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
    """One turn of a conversation; `role` is what the model's template knows ("system", "user", ...).

    `tool_calls` are those that an assistant's turn made. `tool_call_id` and `name` belong to a tool's turn: the
    call that it answers, and the tool.
    """

    role: str
    content: str
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a request is sampled. None means unset: the service's default, never zero.

    Ranges are those of the service, which refuses what is outside: `temperature` >= 0 (0 is greedy),
    `top_p` in (0, 1], `min_p` in [0, 1], `seed` any int64, at most 64 `stop` strings. An empty list is the same
    as unset.

    `repetition_penalty` in (0, 2] is for tokens of prompt and completion, `presence_penalty` and
    `frequency_penalty` in [-2, 2] for those of the completion. `logit_bias`: token id to what is added to its
    logit, in [-100, 100]. Only `allowed_token_ids` may come, `banned_token_ids` and the token sequences
    `bad_words` never do. `logprobs` (0 to 20): report each token's log probability and those of so many of the
    likeliest; `prompt_logprobs` the same for the prompt. `n` (1 to 64) samples of one prompt, with the seeds
    seed, seed + 1, ... `structured_output`: what each completion has to look like.
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
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] = ()
    banned_token_ids: Sequence[int] = ()
    bad_words: Sequence[Sequence[int]] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    structured_output: StructuredOutput | None = None


DEFAULT_SAMPLING = Sampling()


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request; `cached_tokens` are prompt tokens taken from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token, its own bytes (only a part of a character for some) and its natural log probability."""

    token_id: int
    token: bytes
    logprob: float

    @property
    def text(self) -> str:
        """The bytes as text, what is no whole character as U+FFFD."""
        return self.token.decode(errors="replace")


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """Log probabilities at one position, by the model's own logits.

    `token` is the one that is there, None for the first of a prompt; `rank` 1 is the likeliest. `top` are the
    likeliest tokens, the best first.
    """

    token: TokenLogprob | None
    rank: int
    top: tuple[TokenLogprob, ...]


class Delta(NamedTuple):
    """New text (whole characters) of a sample and the tokens that it completes; parts of a character come at once.

    `index` says which sample. `logprobs` has an entry for each of `token_ids`, when asked for; `prompt_logprobs`
    are the next positions of the prompt. Text of tool calls is in `tool_calls` only. (A named tuple: thousands
    are made in a second.)
    """

    text: str
    token_ids: tuple[int, ...]
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished sample: all of its text, tokens and tool calls, and how it ended.

    `stop_string` or `stop_token_id` is set when one of them, and not a plain end of sequence, stopped it.
    `seed` is the one that was used, given or not. `prompt_logprobs` come with the first sample.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    stop_string: str | None
    stop_token_id: int | None
    seed: int
    request_id: str
    index: int = 0
    logprobs: tuple[PositionLogprobs, ...] = ()
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class Model:
    """A served model. `max_model_len` is prompt + completion, in tokens.

    `default_sampling` is what a request gets where it leaves a field unset; None while no engine is connected.
    `parent`: of a LoRA adapter, the model that it changes; empty: it is no adapter.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    tokenizer_fingerprint: str
    connected_engines: int
    default_sampling: Sampling | None = None
    parent: str = ""
