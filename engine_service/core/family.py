"""The samples of one prompt: which of them may be admitted now, and whose prompt KV the others can share.

Must not know: blocks, budgets, the queue's data structure, the clock.
"""

from dataclasses import replace

from engine_service.core.request import Request
from engine_service.core.sampling import SamplingParams

_SEEDS = 1 << 64
_MAX_SEED = (1 << 63) - 1


def seed_of(seed: int, place: int) -> int:
    """The seed of sample `place`: seed + place, from the largest int64 on to the smallest."""
    seed += place
    return seed if seed <= _MAX_SEED else seed - _SEEDS


def sampling_of(sampling: SamplingParams, place: int) -> SamplingParams:
    """How sample `place` of a submission is sampled. Only the first one tells of the prompt."""
    if place == 0:
        return sampling
    return replace(sampling, seed=seed_of(sampling.seed, place), prompt_logprobs=None)


class Family:
    """The unfinished samples of one submission, by place.

    Until one of them has computed the prompt, at most one is let into the queue or runs: the leader. The others
    are held back, because they would compute the same KV again. Then all may be admitted and share the leader's
    blocks (see KvManager.fork). When a leader ends or is preempted too early, the next one leads.

    `waiting` is in the order of the queue; its first `num_shown` stand in the queue, the others are held back.
    """

    __slots__ = ("num_shown", "running", "waiting")

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_shown = 0

    def donor(self) -> Request | None:
        """A running sample that holds the KV of the whole prompt, written by steps that have been settled."""
        return next((sample for sample in self.running if sample.num_computed >= sample.prompt_length), None)

    def num_admissible(self) -> int:
        """So many of the waiting samples may stand in the queue."""
        if self.donor() is not None:
            return len(self.waiting)
        return 0 if self.running else min(1, len(self.waiting))
