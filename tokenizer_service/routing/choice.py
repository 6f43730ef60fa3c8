"""Which replica a request goes to, as a pure function of what is known of each: cached prefix against load.

Must not know: connections, how the figures come about.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class Policy(Enum):
    """How replicas are chosen."""

    PREFIX = "prefix"
    LEAST_WORK = "least-work"
    ROUND_ROBIN = "round-robin"
    POWER_OF_TWO = "power-of-two"


class Reason(Enum):
    """Why a request went where it went."""

    ONLY = "only"  # there was no other
    PREFIX = "prefix"  # nobody had more of its prompt
    LOAD = "load"  # work decided
    HOT_SPOT = "hot_spot"  # those with more of its prompt are too far behind with their work
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A usable replica, for one request. All in tokens but `streams`: samples that run or wait there.

    `cached_tokens`: of the request's prompt. `queued_tokens`: of waiting prompts, uncached. `outstanding_tokens`:
    prompts and completions that we wait for. `room_tokens`: KV that no running request holds, None: not known.
    """

    cached_tokens: int
    queued_tokens: int
    streams: int
    outstanding_tokens: int
    room_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """Costs are in tokens of prefill that the request waits for.

    `uncached`: what it has to compute itself counts more, because it also takes that time from others; so a request
    rather waits for its prefix than has it computed twice. `stream_tokens`: what a running sample costs a newcomer
    over its life. `memory`: per token of KV that is missing.
    A replica whose work exceeds `hot_factor` times the least one's, plus `hot_slack_tokens`, gets no credit for what
    it has cached: so a prefix that everybody asks for is computed once more elsewhere.
    """

    uncached: float = 2.0
    queued: float = 1.0
    stream_tokens: int = 32
    memory: float = 4.0
    hot_factor: float = 2.0
    hot_slack_tokens: int = 2048


DEFAULT_WEIGHTS = Weights()


@dataclass(frozen=True, slots=True)
class Draw:
    """Where chance and turns come from. `below(n)` is a random number in [0, n); `turn` grows by one a request."""

    below: Callable[[int], int]
    turn: int


def choose(
    policy: Policy, candidates: Sequence[Candidate], prompt_tokens: int, draw: Draw, weights: Weights = DEFAULT_WEIGHTS
) -> tuple[int, Reason]:
    """Index into `candidates` (one at least), and why. Equal ones take turns."""
    if len(candidates) == 1:
        return 0, Reason.ONLY
    match policy:
        case Policy.ROUND_ROBIN:
            return draw.turn % len(candidates), Reason.TURN
        case Policy.LEAST_WORK:
            return _least([each.outstanding_tokens for each in candidates], draw.turn), Reason.LOAD
        case Policy.POWER_OF_TWO:
            return _power_of_two(candidates, prompt_tokens, draw, weights), Reason.LOAD
    most = max(each.cached_tokens for each in candidates)
    if most == 0:
        return _power_of_two(candidates, prompt_tokens, draw, weights), Reason.LOAD
    return _by_prefix(candidates, prompt_tokens, most, draw, weights)


def _by_prefix(
    candidates: Sequence[Candidate], prompt_tokens: int, most: int, draw: Draw, weights: Weights
) -> tuple[int, Reason]:
    work = [work_of(each, weights) for each in candidates]
    ceiling = weights.hot_factor * min(work) + weights.hot_slack_tokens
    is_hot = [each > ceiling for each in work]
    costs = [
        cost_of(each, prompt_tokens, 0 if hot else each.cached_tokens, weights)
        for each, hot in zip(candidates, is_hot, strict=True)
    ]
    chosen = _least(costs, draw.turn)
    if candidates[chosen].cached_tokens == most:
        return chosen, Reason.PREFIX
    missed_a_hot_one = any(
        hot and each.cached_tokens > candidates[chosen].cached_tokens
        for each, hot in zip(candidates, is_hot, strict=True)
    )
    return chosen, Reason.HOT_SPOT if missed_a_hot_one else Reason.LOAD


def work_of(candidate: Candidate, weights: Weights) -> float:
    """What is there to do before, or beside, a newcomer."""
    return weights.queued * candidate.queued_tokens + weights.stream_tokens * candidate.streams


def cost_of(candidate: Candidate, prompt_tokens: int, cached_tokens: int, weights: Weights) -> float:
    """Of sending a request there, in tokens of prefill."""
    uncached = max(0, prompt_tokens - cached_tokens)
    cost = work_of(candidate, weights) + weights.uncached * uncached
    if candidate.room_tokens is not None:
        missing = candidate.queued_tokens + uncached - candidate.room_tokens
        cost += weights.memory * max(0, missing)
    return cost


def _power_of_two(candidates: Sequence[Candidate], prompt_tokens: int, draw: Draw, weights: Weights) -> int:
    """The cheaper of two at random: services that do not see each other's requests do not all pick the same."""
    count = len(candidates)
    first = draw.below(count)
    second = (first + 1 + draw.below(count - 1)) % count
    pair = sorted((first, second))
    costs = [cost_of(candidates[place], prompt_tokens, 0, weights) for place in pair]
    return pair[_least(costs, draw.turn)]


def _least(costs: Sequence[float], turn: int) -> int:
    least = min(costs)
    equal = [place for place, cost in enumerate(costs) if cost == least]
    return equal[turn % len(equal)]
