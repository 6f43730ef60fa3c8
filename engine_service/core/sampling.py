"""How one request is sampled, after validation: plain numbers.

Must not know: torch, protobuf, the clock.
"""

from dataclasses import dataclass, field
from enum import Enum


class ConstraintKind(Enum):
    """How `StructuredOutput.text` is to be read."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"  # `text` is empty
    REGEX = "regex"
    GRAMMAR = "grammar"  # Lark or GBNF
    CHOICE = "choice"  # `text` is a JSON array of strings


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """What a completion has to look like.

    `compiled` is the grammar once there is one, in the worker's own terms; requests share it, nothing here looks
    into it.
    """

    kind: ConstraintKind
    text: str
    compiled: object | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """What is used where a request leaves a field unset; by themselves the neutral values, which change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


NEUTRAL_DEFAULTS = SamplingDefaults()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Validated sampling settings; every field is in range and final.

    `logit_bias` are (token id, number added to its logit), by id. `allowed_token_ids` None: all. `bad_words`
    are sequences of token ids that the completion never contains. `logprobs` and `prompt_logprobs`: how many
    of the most likely tokens to report beside the one that is there; None: nothing.
    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off.
    `seed` is any int64; the random number of a token is a function of
    (seed, position of the token in prompt + completion) alone.
    """

    max_tokens: int
    seed: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: frozenset[int] | None = None
    banned_token_ids: frozenset[int] = frozenset()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_output: StructuredOutput | None = None
