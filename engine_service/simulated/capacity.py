"""Answers capacity questions by running fleets in virtual time: what rate do N engines serve, how many for a rate.

Must not know: where the step model comes from, how answers are shown.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_service.core.scheduler import SchedulerConfig
from engine_service.simulated.fleet import Arrival, Fleet, Record, VirtualEngine
from engine_service.simulated.step_model import StepModel

MAX_ENGINES = 256
_PRECISION = 0.02
_LOWEST_RATE = 0.01


@dataclass(frozen=True, slots=True)
class Workload:
    """Poisson arrivals. Lengths in tokens, drawn evenly from mean * (1 - spread) .. mean * (1 + spread).

    The first `shared_tokens` of a prompt are common to all.
    """

    input_tokens: int
    output_tokens: int
    spread: float = 0.5
    shared_tokens: int = 0
    num_requests: int = 500
    seed: int = 0

    def arrivals(self, rate: float) -> list[Arrival]:
        """At `rate` requests per second. The same requests at every rate, only nearer to each other."""
        dice = random.Random(self.seed)  # noqa: S311  (reproducible on purpose)
        now, arrivals = 0.0, []
        for number in range(self.num_requests):
            now += dice.expovariate(rate)
            length = self._length(self.input_tokens, dice)
            shared = min(self.shared_tokens, length - 1)
            own = range(1 + (number * 7919) % 16_384, 1 + (number * 7919) % 16_384 + length - shared)
            prompt = [*([0] * shared), *own]
            arrivals.append(Arrival(now, prompt, self._length(self.output_tokens, dice)))
        return arrivals

    def _length(self, mean: int, dice: random.Random) -> int:
        return max(1, round(mean * dice.uniform(1 - self.spread, 1 + self.spread)))


@dataclass(frozen=True, slots=True)
class Goal:
    """A request is good when both hold, in seconds; `share` of all requests must be good."""

    ttft_s: float
    tpot_s: float
    share: float = 0.99

    def is_met_by(self, record: Record) -> bool:
        return record.refusal is None and record.ttft <= self.ttft_s and record.tpot <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run. Times in seconds, over the requests that were served; `busy`: share of the time engines computed."""

    engines: int
    rate: float
    good_share: float
    refused: int
    ttft_p50: float
    ttft_p99: float
    tpot_p50: float
    tpot_p99: float
    longest_gap: float
    output_tokens_per_s: float
    busy: float

    def meets(self, goal: Goal) -> bool:
        return self.good_share >= goal.share


@dataclass(frozen=True, slots=True)
class CapacityPlanner:
    """Everything about an engine that a plan depends on."""

    model: StepModel
    scheduler: SchedulerConfig
    workload: Workload
    goal: Goal

    def outcome(self, engines: int, rate: float) -> Outcome:
        fleet = Fleet([VirtualEngine(self.scheduler, self.model) for _ in range(engines)])
        records, end = fleet.run(self.workload.arrivals(rate))
        busy = sum(engine.busy_seconds for engine in fleet.engines) / (engines * end) if end else 0.0
        return summarize(records, self.goal, engines, rate, end, busy)

    def highest_rate(self, engines: int, note: Callable[[Outcome], None]) -> float:
        """Requests per second that still meet the goal, within 2 %; 0 when none do. `note` hears of every run."""

        def is_enough(rate: float) -> bool:
            outcome = self.outcome(engines, rate)
            note(outcome)
            return outcome.meets(self.goal)

        low, high = 0.0, 1.0 * engines
        while is_enough(high):
            low, high = high, high * 2
        while high - low > _PRECISION * high and high > _LOWEST_RATE:
            middle = (low + high) / 2
            low, high = (middle, high) if is_enough(middle) else (low, middle)
        return low

    def engines_for(self, rate: float, note: Callable[[Outcome], None]) -> int | None:
        """The fewest engines that meet the goal at this rate; None when 256 do not."""

        def is_enough(engines: int) -> bool:
            outcome = self.outcome(engines, rate)
            note(outcome)
            return outcome.meets(self.goal)

        low, high = 0, 1
        while not is_enough(high):
            if high == MAX_ENGINES:
                return None
            low, high = high, min(2 * high, MAX_ENGINES)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_enough(middle) else (middle, high)
        return high


def summarize(records: Sequence[Record], goal: Goal, engines: int, rate: float, end: float, busy: float) -> Outcome:
    served = [record for record in records if record.refusal is None]
    ttft, tpot = sorted(record.ttft for record in served), sorted(record.tpot for record in served)
    return Outcome(
        engines=engines,
        rate=rate,
        good_share=sum(goal.is_met_by(record) for record in records) / len(records),
        refused=len(records) - len(served),
        ttft_p50=quantile(ttft, 0.5),
        ttft_p99=quantile(ttft, 0.99),
        tpot_p50=quantile(tpot, 0.5),
        tpot_p99=quantile(tpot, 0.99),
        longest_gap=max((record.longest_gap for record in served), default=0.0),
        output_tokens_per_s=sum(record.num_tokens for record in served) / end if end else 0.0,
        busy=busy,
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The nearest rank (the smallest value with at least that share at or below it); 0 of nothing."""
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)] if ordered else 0.0
