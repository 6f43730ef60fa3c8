"""Looks for the knee: the highest rate that a server sustains.

Rates grow by a factor until one is not sustained, then the gap is halved (geometrically) a few times.
Must not know: how a rate is measured, how results look.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from tokenwire_client.load.arrivals import MAX_RATE
from tokenwire_client.load.results import Knee, Round

Measure = Callable[[float], Awaitable[Round]]
MAX_STEPS = 200


@dataclass(frozen=True, slots=True)
class Rule:
    """When a rate counts as sustained.

    With targets (`by_goodput`): at least `good_share` of the requests are good. Without: as many requests end well in
    the window as begin in it, except for `1 - kept_share` of them, and none fails or is not sent.
    """

    by_goodput: bool
    good_share: float = 0.95
    kept_share: float = 0.9

    def __post_init__(self) -> None:
        for name in ("good_share", "kept_share"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name} {getattr(self, name):g} is outside (0, 1]")

    def holds(self, found: Round) -> bool:
        counts = found.counts
        if self.by_goodput:
            return counts.good_share >= self.good_share
        if counts.failed or counts.not_sent or not counts.intended:
            return False
        wanted = found.rates.offered * (1 - counts.cancelled / counts.intended)
        return found.rates.ok >= self.kept_share * wanted

    def doubt(self, found: Round) -> str | None:
        """A note where so few requests were sent that a single one decides."""
        missed = 1 - (self.good_share if self.by_goodput else self.kept_share)
        if not 0 < found.counts.intended * missed < 1:
            return None
        return f"Of {found.counts.intended} requests a single one decides: a longer duration would tell more."

    def words(self) -> str:
        if self.by_goodput:
            return f"at least {self.good_share:.0%} of the requests within the targets"
        return f"no failures, and requests end at {self.kept_share:.0%} or more of the rate at which they begin"


@dataclass(frozen=True, slots=True)
class Plan:
    """Rates to try: `rates` as given, or from `first` by `factor` up to `most`, then `refine` halvings."""

    first: float = 1.0
    factor: float = 2.0
    most: float = 1024.0
    refine: int = 3
    rates: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.rates) > MAX_STEPS or any(not 0 < rate <= MAX_RATE for rate in self.rates):
            raise ValueError(f"at most {MAX_STEPS} rates, each above 0 and at most {MAX_RATE:g}")
        if not 0 < self.first <= self.most <= MAX_RATE:
            raise ValueError(
                f"rates from {self.first:g} to {self.most:g}: the first must be above 0 and at most the last, "
                f"the last at most {MAX_RATE:g}"
            )
        if not 1 < self.factor <= 100 or not 0 <= self.refine <= 20:
            raise ValueError(f"factor {self.factor:g} is outside (1, 100], or {self.refine} halvings are not 0 to 20")


async def sweep(plan: Plan, rule: Rule, measure: Measure) -> tuple[list[Round], Knee]:
    """Rounds by ascending rate. Ends early when a round was interrupted."""
    found: list[Round] = []

    async def sustained(rate: float) -> bool:
        measured = await measure(rate)
        doubt = rule.doubt(measured)
        found.append(replace(measured, notes=(*measured.notes, doubt)) if doubt else measured)
        return rule.holds(found[-1]) and not found[-1].interrupted

    if plan.rates:
        for rate in plan.rates:
            await sustained(rate)
            if found[-1].interrupted:
                break
    else:
        await _search(plan, sustained, lambda: found[-1].interrupted)
    found.sort(key=lambda each: each.rate)
    return found, knee_of(found, rule)


async def _search(plan: Plan, sustained: Callable[[float], Awaitable[bool]], is_over: Callable[[], bool]) -> None:
    good, bad, rate = math.nan, math.nan, plan.first
    while math.isnan(bad):
        if await sustained(rate):
            good = rate
        else:
            bad = rate
        if is_over() or rate >= plan.most:
            break
        rate = min(rate * plan.factor, plan.most)
    if math.isnan(bad):
        return
    if math.isnan(good):
        good = plan.first / plan.factor**2  # the first was too much: look below it
    for _ in range(plan.refine):
        if is_over():
            return
        middle = round_rate(math.sqrt(good * bad))
        if await sustained(middle):
            good = middle
        else:
            bad = middle


def knee_of(found: list[Round], rule: Rule) -> Knee:
    """The last of the rates, ascending, before the first that is not sustained."""
    best, failed = math.nan, math.nan
    for each in (each for each in found if not each.interrupted):
        if not rule.holds(each):
            failed = each.rate
            break
        best = each.rate
    return Knee(best, failed, rule.words())


def round_rate(rate: float) -> float:
    """Three significant digits: what a person would type."""
    return float(f"{rate:.3g}")
