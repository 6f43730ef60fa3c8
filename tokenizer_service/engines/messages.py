"""What goes to an engine and comes back for one generation, as plain data.

Must not know: grpc, protobuf, text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple, Protocol

from service_runtime.tracing import UNTRACED, Span
from tokenizer_service.engines.refusal import Refusal


@dataclass(frozen=True, slots=True)
class JsonSchema:
    """The completion is JSON that fits the schema (given as JSON)."""

    schema: str


@dataclass(frozen=True, slots=True)
class JsonObject:
    """The completion is any JSON object."""


@dataclass(frozen=True, slots=True)
class Regex:
    """The whole completion matches."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Grammar:
    """Lark syntax, or EBNF as llama.cpp writes it."""

    text: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The completion is one of these."""

    values: tuple[str, ...]


StructuredOutput = JsonSchema | JsonObject | Regex | Grammar | Choice

_WITH_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling settings as the client gave them; None is unset and never the same as zero."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int | None = None
    structured_output: StructuredOutput | None = None

    @property
    def num_samples(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def has_logprobs(self) -> bool:
        """Whether any log probabilities were asked for."""
        return self.logprobs is not None or self.prompt_logprobs is not None

    def with_defaults(self, defaults: "SamplingOptions") -> "SamplingOptions":
        """With a model's own settings where nothing is set: said once, they hold on whichever engine goes on."""
        unset = [name for name in _WITH_DEFAULTS if getattr(self, name) is None]
        given = {name: value for name in unset if (value := getattr(defaults, name)) is not None}
        return replace(self, **given) if given else self


@dataclass(frozen=True, slots=True)
class TokenSubmission:
    """One generation for an engine. `deadline` is a reading of the event loop's clock, seconds."""

    request_id: str
    token_ids: Sequence[int]
    sampling: SamplingOptions
    deadline: float | None = None
    cache_salt: str | None = None
    priority: int | None = None
    resumed_token_ids: Sequence[int] = ()
    """Tokens of its one sample that another engine has generated."""
    tenant: str = ""
    weight: int = 1
    adapter: str = ""
    adapter_fingerprint: str = ""
    """Which content the adapter has to have, on whichever engine."""
    span: Span = UNTRACED
    """The request's: what happens to it at engines becomes a part of it."""


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """Of one adapter that an engine has. `in_memory`: it need not be read first."""

    fingerprint: str
    in_memory: bool


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What an engine says of its model when a session opens. Lengths in tokens.

    `default_sampling` is used where a request leaves a field unset. `block_size`: tokens per KV block, 0: unknown.
    Models with the same `weights_fingerprint` give the same tokens. `adapters` by name, as the engine told last.
    """

    name: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    tokenizer_fingerprint: str
    engine_epoch: str
    default_sampling: SamplingOptions = SamplingOptions()
    block_size: int = 0
    weights_fingerprint: str = ""
    adapters: Mapping[str, AdapterInfo] = field(default_factory=dict)


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. `completion_tokens` includes a final stop token."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class StageTimes:
    """Seconds of a sample inside the engine that ended it, by that engine's clock; 0 for a stage it did not reach.

    A resumed sample has only its time at the last engine here. `preemptions`: how often it gave its KV blocks up there.
    """

    queue_s: float
    prefill_s: float
    decode_s: float
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class EngineFinish:
    """The engine's last word. `refusal` is set when the reason is ABORT or ERROR.

    `stages` is None when the engine never had the sample.
    """

    reason: FinishReason
    usage: Usage
    stop_token_id: int | None = None
    refusal: Refusal | None = None
    stages: StageTimes | None = None


class PositionLogprobs(NamedTuple):
    """Natural log probabilities at one position, by the model's own logits.

    `token` is (id, log probability) of the token there, None for the first prompt token; `rank` is 1 for the
    most likely one; `top` are the most likely tokens, the best first.
    """

    token: tuple[int, float] | None
    rank: int
    top: tuple[tuple[int, float], ...]


class TokenNews(NamedTuple):
    """What is new of one sample (`index` of n). The log probabilities are empty unless asked for.

    `cached_tokens`: prompt tokens that were found in the cache, with the first token; 0 afterwards.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs
    token_ids: Sequence[int]
    finish: EngineFinish | None = None
    logprobs: Sequence[PositionLogprobs] = ()
    prompt_logprobs: Sequence[PositionLogprobs] = ()
    cached_tokens: int = 0


class TokenSink(Protocol):
    """Takes the news of one generation. Called on the event loop; must return at once and never raise."""

    def on_news(self, news: TokenNews) -> None: ...

    def on_lost(self, refusal: Refusal) -> None:
        """The engine is gone: no news will come any more."""


class TokenStream(Protocol):
    """The sender's hold on a generation that was taken on."""

    def replicas(self) -> tuple[str, ...]:
        """Addresses of the engines that have it now."""

    def cancel(self, index: int | None = None) -> None:
        """Tells the engine, once, to stop one sample (None: all); the engine's last word may still come."""

    def close(self) -> None:
        """Cancels if it still runs, and asks for no more news."""

    @property
    def engines(self) -> tuple[str, ...]:
        """Addresses of those that have had it, in order; again, one that took it again."""
        ...


class ReplicaStream(TokenStream, Protocol):
    """The hold on a generation that one engine has taken."""

    @property
    def replica(self) -> str:
        """Address of the engine."""
        ...

    @property
    def model(self) -> ModelInfo:
        """What the engine served when it took the generation."""
        ...


def sample_seed(seed: int, index: int) -> int:
    """The seed of the sample `index`: that many more than the first one's, wrapping at int64."""
    return (seed + index + 2**63) % 2**64 - 2**63
