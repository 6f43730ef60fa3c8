"""From two readings of a service's status to what happened in between.

Must not know: how a status is read or shown.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenwire_client.operator_status import EngineFigures, EngineStatus, Status


@dataclass(frozen=True, slots=True)
class Reading:
    """A status and when it was read: `at` in seconds of a clock that only goes forward."""

    at: float
    status: Status


@dataclass(frozen=True, slots=True)
class EngineRates:
    """Of one engine between two readings. None: there was nothing of the kind.

    `tokens_per_step`: prompt tokens computed and tokens generated.
    """

    prompt_tokens_per_second: float
    generated_tokens_per_second: float
    steps_per_second: float
    step_ms: float | None
    tokens_per_step: float | None
    prefix_hit_ratio: float | None
    preemptions: int


@dataclass(frozen=True, slots=True)
class Frame:
    """What is shown: the last status, what changed since the one before, generated tokens/s of the frames before.

    `problem`: why there is no newer status; `status` is then `age` seconds old, or missing.
    """

    target: str
    status: Status | None
    rates: dict[str, EngineRates]
    history: tuple[float, ...]
    problem: str = ""
    age: float = 0.0

    @property
    def prompt_tokens_per_second(self) -> float:
        return sum(rates.prompt_tokens_per_second for rates in self.rates.values())

    @property
    def generated_tokens_per_second(self) -> float:
        return sum(rates.generated_tokens_per_second for rates in self.rates.values())


def engine_rates(before: Reading, after: Reading) -> dict[str, EngineRates]:
    """By address; an engine that has started again meanwhile, or did not answer, has none."""
    seconds = after.at - before.at
    earlier = {each.engine.address: each for each in before.status.engines}
    rates: dict[str, EngineRates] = {}
    for each in after.status.engines:
        known = earlier.get(each.engine.address)
        if known is not None and seconds > 0 and _same_life(known, each):
            assert known.figures is not None
            assert each.figures is not None
            rates[each.engine.address] = _rates(known.figures, each.figures, seconds)
    return rates


def _same_life(before: EngineStatus, after: EngineStatus) -> bool:
    if before.figures is None or after.figures is None:
        return False
    return after.figures.steps_total >= before.figures.steps_total and (
        before.engine.engine_epoch == after.engine.engine_epoch
    )


def _rates(before: EngineFigures, after: EngineFigures, seconds: float) -> EngineRates:
    steps = after.steps_total - before.steps_total
    prompt = after.prompt_tokens_total - before.prompt_tokens_total
    generated = after.generated_tokens_total - before.generated_tokens_total
    looked_up = after.looked_up_tokens_total - before.looked_up_tokens_total
    cached = after.cached_tokens_total - before.cached_tokens_total
    busy = after.step_seconds_total - before.step_seconds_total
    return EngineRates(
        prompt_tokens_per_second=prompt / seconds,
        generated_tokens_per_second=generated / seconds,
        steps_per_second=steps / seconds,
        step_ms=1000 * busy / steps if steps else None,
        tokens_per_step=(prompt + generated) / steps if steps else None,
        prefix_hit_ratio=cached / looked_up if looked_up else None,
        preemptions=after.preemptions_total - before.preemptions_total,
    )


def hit_ratio(figures: EngineFigures) -> float | None:
    """Since the engine's start."""
    return figures.cached_tokens_total / figures.looked_up_tokens_total if figures.looked_up_tokens_total else None


class History:
    """Makes frames of readings, and remembers so many rates for the curve."""

    def __init__(self, target: str, length: int = 60) -> None:
        self._target = target
        self._length = length
        self._last: Reading | None = None
        self._rates: dict[str, EngineRates] = {}
        self._curve: Sequence[float] = ()

    def add(self, reading: Reading) -> Frame:
        if self._last is not None:
            self._rates = engine_rates(self._last, reading)
            total = sum(rates.generated_tokens_per_second for rates in self._rates.values())
            self._curve = (*self._curve, total)[-self._length :]
        self._last = reading
        return Frame(self._target, reading.status, self._rates, tuple(self._curve))

    def away(self, problem: str, now: float) -> Frame:
        """The service did not answer."""
        status = None if self._last is None else self._last.status
        age = 0.0 if self._last is None else now - self._last.at
        return Frame(self._target, status, {}, tuple(self._curve), problem, age)
