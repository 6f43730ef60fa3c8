"""Numbers about the scheduler: a snapshot for metrics, and the record that each step leaves.

Must not know: how the numbers come about, exporters, the clock.
"""

from dataclasses import dataclass

from engine_service.core.outcome import FinishReason


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges at this moment, and counters that only grow. used + cached + free blocks = total blocks."""

    running: int
    waiting: int  # new and preempted
    waiting_tokens: int  # their prompt tokens
    total_blocks: int
    used_blocks: int  # referenced
    cached_blocks: int  # free, with reusable content
    free_blocks: int  # free, without content
    steps: int  # plans made
    preemptions: int
    prompt_tokens: int  # prompt positions computed, again after a preemption included
    generated_tokens: int
    cached_tokens: int  # prompt tokens found in the prefix cache at first admission
    looked_up_tokens: int  # prompt tokens looked up at first admission
    evictions: int  # blocks whose reusable content was given up
    finished_by_reason: dict[FinishReason, int]
    tenants: tuple[tuple[str, int, int], ...] = ()  # name, running, waiting; of those with a name and a request
    drafted_tokens: int = 0  # guessed tokens that were computed
    accepted_tokens: int = 0  # those that were right


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one plan did. `running`, `waiting` and `used_blocks` are counted after it was made."""

    step: int
    decode_tokens: int  # running requests that compute one token
    prefill_tokens: int
    running: int
    waiting: int
    used_blocks: int
    admitted: tuple[int, ...]
    preempted: tuple[int, ...]
    num_decodes: int = 0  # the plan's first chunks, so many, are decodes
    cached_blocks: int = 0
    free_blocks: int = 0
    draft_tokens: int = 0  # guessed tokens that its decodes verify


class Counters:
    """The scheduler's running totals; see `EngineStats` for their meaning."""

    __slots__ = ("finished", "generated_tokens", "preemptions", "prompt_tokens", "steps")

    def __init__(self) -> None:
        self.steps = 0
        self.preemptions = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.finished = dict.fromkeys(FinishReason, 0)
