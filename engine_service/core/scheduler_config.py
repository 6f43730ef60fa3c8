"""The scheduler's settings, frozen and checked once.

Must not know: where they come from, requests, torch.
"""

from dataclasses import dataclass

from engine_service.core.admission import servable_model_len

MIN_PREFILL_BESIDE_DECODES = 16
"""Enough for a prompt to move on in every step."""

ROWS_PER_TILE = 32
"""Matrix products take rows in tiles, and a tile that is not full costs as much as a full one."""


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Every combination that passes works; ValueError with the numbers otherwise.

    `step_token_budget` bounds the tokens of a step, `prefill_chunk_size` those of one request in a step.
    `max_model_len` bounds prompt plus completion and must fit the pool (see `servable_model_len`).
    `prefill_per_decode` bounds the prompt tokens of a step that also decodes, so that a long prompt does not hold up
    the streams that run: so many for each decode, such that the step's rows are whole tiles, and
    MIN_PREFILL_BESIDE_DECODES at least. 0: no such bound.
    `max_draft_tokens` bounds the guessed tokens that a decode may verify in a step. 0: none.
    """

    block_size: int
    num_blocks: int
    step_token_budget: int
    prefill_chunk_size: int
    max_num_requests: int
    max_waiting_requests: int
    max_waiting_tokens: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    prefix_cache: bool
    prefill_per_decode: int = 0
    max_draft_tokens: int = 0

    def __post_init__(self) -> None:
        self._check_positive()
        self._check_budget()
        self._check_pool()

    def _check_positive(self) -> None:
        for name in (
            "block_size",
            "num_blocks",
            "step_token_budget",
            "prefill_chunk_size",
            "max_num_requests",
            "max_waiting_requests",
            "max_waiting_tokens",
        ):
            value: int = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} {value:,} is below 1")
        if self.prefill_per_decode < 0:
            raise ValueError(f"prefill_per_decode {self.prefill_per_decode:,} is negative")
        if self.max_draft_tokens < 0:
            raise ValueError(f"max_draft_tokens {self.max_draft_tokens:,} is negative")
        if self.max_model_len < 2:
            raise ValueError(f"max_model_len {self.max_model_len:,} is below 2 (one prompt token, one new token)")

    def _check_budget(self) -> None:
        if self.prefill_chunk_size > self.step_token_budget:
            raise ValueError(
                f"prefill_chunk_size {self.prefill_chunk_size:,} exceeds step_token_budget {self.step_token_budget:,}"
            )
        if self.max_num_requests > self.step_token_budget:
            raise ValueError(
                f"max_num_requests {self.max_num_requests:,} exceeds step_token_budget "
                f"{self.step_token_budget:,}: each running request needs one token of a step"
            )

    def _check_pool(self) -> None:
        servable = servable_model_len(self.max_model_len, self.block_size, self.num_blocks)
        if servable < self.max_model_len:
            raise ValueError(
                f"max_model_len {self.max_model_len:,} does not fit {self.num_blocks:,} KV blocks of "
                f"{self.block_size:,} tokens: they serve up to {servable:,} tokens"
            )
