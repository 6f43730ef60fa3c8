"""What the scheduler decides for one step, and what the worker returns: immutable data.

Nothing else crosses between them. Must not know: torch, the clock, how a plan is made or executed.
"""

from dataclasses import dataclass, field
from typing import NamedTuple

from engine_service.core.outcome import PositionLogprobs
from engine_service.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request the worker does not hold yet (first step, or first after a preemption).

    `token_ids` is everything known: the prompt and, after a preemption, the completion so far.
    `prompt_length` splits the two. `block_ids` is the block table so far, cached prefix included.
    `known_prompt_logprobs`: so many of the first prompt tokens have theirs already (see `Result`). `adapter`: the
    number of the one that changes the model for it, 0: none.
    """

    request_id: int
    token_ids: tuple[int, ...]
    prompt_length: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    known_prompt_logprobs: int = 0
    adapter: int = 0


class Chunk(NamedTuple):
    """The tokens of one request in one step: positions `start` .. `start + length - 1`.

    The worker holds the token ids itself: those of `NewRequest`, and every token it sampled since, so
    that a chunk can be planned before the token it starts with has been read back. `new_block_ids` are
    its blocks from the one that begins at `start` or behind it. `samples`: the chunk reaches the request's last token,
    so the worker takes logits there and samples the token at position `start + length`.
    `allow_stop` is False while min_tokens is not reached: the request's stop tokens must not be sampled.
    `draft`: the chunk ends with these guessed tokens, of positions `start + 1` on. Each of its positions samples, as if
    the draft were right up to there; what counts ends with the first sample that is not the next guessed token. No
    further chunk of the request is planned until that is known.
    (A named tuple, because hundreds are made in a step and a frozen dataclass costs three times as much.)
    """

    request_id: int
    start: int
    length: int
    new_block_ids: tuple[int, ...]
    samples: bool
    allow_stop: bool = True
    draft: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One step of the engine: decode chunks (length 1 and a draft) first, then prefill chunks.

    `dropped` are requests that the worker forgets before it executes the chunks (finished, aborted or
    preempted since the previous plan). A request in `new` is always also in `chunks`; it may be in
    `dropped` too when it was preempted and comes back at once. `copies` are pairs (source block, destination
    block), executed in any order before the chunks: no destination is a source. `prefill_tokens`: those of its tokens
    that are not of decodes; for statistics alone.
    """

    step: int
    chunks: tuple[Chunk, ...]
    new: tuple[NewRequest, ...] = ()
    dropped: tuple[int, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    prefill_tokens: int = field(default=0, compare=False)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Failure:
    """One request's own failure in a step (say, its logits were not finite); the others go on.

    `is_clients`: what the client asked for cannot go on (say, every token is excluded).
    """

    request_id: int
    message: str
    is_clients: bool = False


class PromptLogprobs(NamedTuple):
    """Those of the prompt tokens at `start`, `start + 1`, ...; `start` is at least 1."""

    request_id: int
    start: int
    entries: tuple[PositionLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What the worker returns for a plan: one token for each chunk that samples, or its failure.

    `sampled` pairs (request id, token id), in the order of the plan's chunks. `logprobs` are those of the
    sampled tokens, for the requests that want them. `prompt_logprobs` are those of prompt tokens that
    follow a token of this step, for the requests that want them. `accepted` are guessed tokens that were right, for the
    requests that have some: they come before the request's token in `sampled`, which is the one after them; so do their
    log probabilities.
    """

    step: int
    sampled: tuple[tuple[int, int], ...]
    failures: tuple[Failure, ...] = ()
    logprobs: tuple[tuple[int, PositionLogprobs], ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    accepted: tuple[tuple[int, tuple[int, ...]], ...] = ()
