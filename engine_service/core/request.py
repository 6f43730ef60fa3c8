"""One generation being served: the single mutable object that owns all state of a request.

Must not know: the queues it stands in, how blocks are handed out, torch, the clock.
"""

from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from engine_service.core.fairness import Account, Tenant
from engine_service.core.outcome import Finish, PositionLogprobs, RequestNews
from engine_service.core.packed_logprobs import PackedLogprobs
from engine_service.core.prefix_index import CachedBlock
from engine_service.core.prompt_lookup import PromptLookup
from engine_service.core.sampling import SamplingParams

if TYPE_CHECKING:
    from engine_service.core.family import Family

NEVER = 1 << 62
"""A position that no request reaches."""

_NOTHING_BEFORE = PositionLogprobs(None, 0, ())
"""Of the first prompt token."""


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


_ALLOWED: dict[RequestStatus, frozenset[RequestStatus]] = {
    RequestStatus.WAITING: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.RUNNING: frozenset({RequestStatus.PREEMPTED, RequestStatus.FINISHED}),
    RequestStatus.PREEMPTED: frozenset({RequestStatus.RUNNING, RequestStatus.FINISHED}),
    RequestStatus.FINISHED: frozenset(),
}


class Request:
    """Prompt and completion, how far they are computed, and the blocks that hold their KV.

    `arrival` and `deadline` are seconds on the caller's clock. Requests are ranked by (priority, arrival, id): a
    lower number is better, so the lowest-ranked one is the latest of the worst priority. `family` joins it with the
    other samples of its prompt, if it has any. `resumed` are completion tokens of another engine, which go on here.
    `adapter`: see `NewRequest`; its identity has to be in `cache_salt`. `account` is its own until the scheduler takes
    it, then the one that all requests of its tenant and priority share. There are no phases; three counters say it all:

    - `num_computed`: positions whose KV exists; moves when a result is applied.
    - `num_scheduled`: positions named by plans so far (>= num_computed).
    - known tokens: `token_ids` (append-only) plus `num_sampling`, the samples still in flight.
    """

    __slots__ = (
        "account",
        "adapter",
        "arrival",
        "block_keys",
        "block_table",
        "cache_salt",
        "cached_tokens",
        "deadline",
        "family",
        "finish",
        "first_missing_key",
        "free_blocks_wanted",
        "in_flight",
        "is_resumed",
        "last_published",
        "length_limit",
        "logprobs",
        "lookup",
        "num_computed",
        "num_drafted",
        "num_given",
        "num_published",
        "num_reported",
        "num_sampling",
        "num_scheduled",
        "num_slots",
        "priority",
        "prompt_length",
        "prompt_logprobs",
        "publish_at",
        "rank",
        "request_id",
        "sampling",
        "status",
        "times_passed",
        "token_ids",
        "was_admitted",
    )

    def __init__(
        self,
        request_id: int,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        arrival: float,
        deadline: float | None = None,
        cache_salt: str = "",
        priority: int = 0,
        family: "Family | None" = None,
        resumed: Sequence[int] = (),
        tenant: str = "",
        weight: int = 1,
        adapter: int = 0,
    ) -> None:
        self.request_id = request_id
        self.token_ids = [*prompt, *resumed]
        self.prompt_length = len(prompt)
        self.is_resumed = len(resumed) > 0
        self.sampling = sampling
        self.arrival = arrival
        self.deadline = deadline
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.priority = priority
        self.family = family
        self.account = Account(Tenant(tenant, weight))
        self.rank = (priority, arrival, request_id)
        self.length_limit = self.prompt_length + sampling.max_tokens  # tokens, prompt included
        self.status = RequestStatus.WAITING
        self.finish: Finish | None = None
        self.num_given = len(self.token_ids)  # tokens that came with the request
        self.num_reported = self.num_given  # tokens that the client knows
        # Log probabilities that the client does not know yet: of unreported tokens, of the prompt until its end.
        self.logprobs: list[PositionLogprobs] = []
        self.prompt_logprobs: PackedLogprobs | None = None
        # Waiting: how often a later request was admitted first, and what a refused admission found.
        self.times_passed = 0
        self.free_blocks_wanted = 0
        self.first_missing_key: bytes | None = None
        self.was_admitted = False
        self.cached_tokens = 0  # prompt tokens found in the cache at the first admission
        self.lookup: PromptLookup | None = None  # made when a draft could pay
        # Running.
        self.num_drafted = 0  # guessed tokens in flight: where they stop being right is not known yet
        self.in_flight = 0  # plans not yet applied that name this request
        self.block_keys: list[bytes] = []  # chain keys of the first full blocks, as far as needed so far
        self.block_table: list[int] = []
        self.clear_progress()

    def clear_progress(self) -> None:
        """Forgets all KV (the blocks have been given back); the tokens stay."""
        self.block_table = []
        self.num_slots = 0  # token positions that the block table holds
        self.num_computed = 0
        self.num_scheduled = 0
        self.num_sampling = 0
        self.num_published = 0  # leading blocks that went through the prefix index
        self.publish_at = 0  # value of num_computed at which the next block can be published
        self.last_published: CachedBlock | None = None

    @property
    def num_completion(self) -> int:
        return len(self.token_ids) - self.prompt_length

    def move_to(self, status: RequestStatus) -> None:
        """Changes the status; ValueError when the transition table does not allow it."""
        if status not in _ALLOWED[self.status]:
            raise ValueError(f"request {self.request_id}: {self.status.value} -> {status.value} is not allowed")
        self.status = status

    @property
    def known_prompt_logprobs(self) -> int:
        """So many of the first prompt tokens have their log probabilities. Before the first one there is nothing."""
        return self.prompt_length if self.num_completion else max(1, len(self.prompt_logprobs or ()))

    def take_news(self) -> RequestNews:
        """The tokens since the last call with their log probabilities, and the finish if it came."""
        token_ids = tuple(self.token_ids[self.num_reported :])
        sampling = self.sampling
        is_first = self.num_reported == self.num_given and bool(token_ids)
        cached = self.cached_tokens if is_first else 0
        if sampling.logprobs is None and sampling.prompt_logprobs is None:
            news = RequestNews(self.request_id, token_ids, self.finish, (), (), cached)
        else:
            news = RequestNews(
                self.request_id,
                token_ids,
                self.finish,
                tuple(self.logprobs),
                self._take_prompt_logprobs() if is_first and sampling.prompt_logprobs is not None else (),
                cached,
            )
            self.logprobs.clear()
        self.num_reported = len(self.token_ids)
        return news

    def keep_prompt_logprobs(self, entries: Sequence[PositionLogprobs]) -> None:
        """Those of the prompt tokens after the ones that are known."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = PackedLogprobs((_NOTHING_BEFORE,))
        self.prompt_logprobs.extend(entries)

    def _take_prompt_logprobs(self) -> Sequence[PositionLogprobs]:
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return (_NOTHING_BEFORE,) if taken is None else taken  # a prompt of one token
