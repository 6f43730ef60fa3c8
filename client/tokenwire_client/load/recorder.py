"""Turns outcomes into figures while a run goes on; memory does not grow with the number of requests.

Must not know: transports, schedules, files.
"""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenwire_client.load.histogram import Histogram
from tokenwire_client.load.outcomes import Ending, Outcome
from tokenwire_client.load.results import Counts, Rates, Round, TenantResult, Tokens
from tokenwire_client.load.timeline import SLOT_S, Event, Timeline, slots_in
from tokenwire_client.load.workload import LoadRequest

_MOST_DOTS = 2000
_LONGEST_MESSAGE = 300
# A window that is a smaller part of the run than this says little; then the whole run is taken.
_LEAST_PART = 0.3
# A generator that is later than this for one request in a hundred measures itself.
LATE_S = 0.05


@dataclass(frozen=True, slots=True)
class Targets:
    """What a good answer keeps, seconds; None: no limit."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for name in ("ttft", "tpot", "e2e"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 3600:
                raise ValueError(f"the target for {name} of {value:g} s is outside (0, 3600]")

    def __bool__(self) -> bool:
        return (self.ttft, self.tpot, self.e2e) != (None, None, None)

    def kept_by(self, outcome: Outcome) -> bool:
        pairs = ((outcome.ttft, self.ttft), (outcome.tpot, self.tpot), (outcome.e2e, self.e2e))
        return all(value is None or limit is None or value <= limit for value, limit in pairs)


class _Tally:
    """Counts and latencies of one tenant, or of all."""

    def __init__(self) -> None:
        self.sent = self.not_sent = self.ok = self.cancelled = self.abandoned = self.good = 0
        self.errors: Counter[str] = Counter()
        self.ttft = Histogram()
        self.e2e = Histogram()

    def add(self, outcome: Outcome, targets: Targets) -> None:
        if outcome.ending is Ending.ERROR:
            self.errors[outcome.status] += 1
            return
        if outcome.ttft is not None and outcome.ending is not Ending.ABANDONED:
            self.ttft.record(outcome.ttft)
        if outcome.ending is Ending.CANCELLED:
            self.cancelled += 1
        elif outcome.ending is Ending.ABANDONED:
            self.abandoned += 1
        else:
            self.ok += 1
            self.good += targets.kept_by(outcome)
            self.e2e.record(outcome.e2e)

    def counts(self) -> Counts:
        return Counts(
            intended=self.sent + self.not_sent,
            sent=self.sent,
            not_sent=self.not_sent,
            ok=self.ok,
            cancelled=self.cancelled,
            abandoned=self.abandoned,
            good=self.good,
            errors=dict(self.errors),
        )


class Recorder:
    """The listener of one run that began at `begin`; requests intended before `begin + warmup_s` are only counted."""

    def __init__(self, begin: float, warmup_s: float, targets: Targets, tenants: Sequence[str], seed: int) -> None:
        self.total = _Tally()
        self.in_flight = 0
        self._begin = begin
        self._warm_at = begin + warmup_s
        self._warmup_s = warmup_s
        self._targets = targets
        self._names = tenants
        self._tenants = [_Tally() for _ in tenants]
        self._timeline = Timeline(begin)
        self._itl, self._tpot, self._lag = Histogram(), Histogram(), Histogram()
        self._seed = seed
        self._warmup = 0
        self._last_intended = begin
        self._last_end = begin
        self._asked = self._prompt = self._cached = self._completion = self._messages = self._without_usage = 0
        self._examples: dict[str, str] = {}
        self._dots: list[tuple[float, float]] = []
        self._seen_dots = 0
        self._sampler = random.Random(seed)  # noqa: S311 (no secret)

    def started(self, request: LoadRequest, intended: float, sent: float) -> None:
        self.in_flight += 1
        self._timeline.add(Event.STARTED, sent)
        self._last_intended = max(self._last_intended, intended)
        if intended < self._warm_at:
            self._warmup += 1
            return
        for tally in (self.total, self._tenants[request.tenant]):
            tally.sent += 1
        self._lag.record(max(0.0, sent - intended))

    def not_sent(self, request: LoadRequest, intended: float) -> None:
        self._last_intended = max(self._last_intended, intended)
        if intended < self._warm_at:
            self._warmup += 1
            return
        for tally in (self.total, self._tenants[request.tenant]):
            tally.not_sent += 1

    def ended(self, outcome: Outcome) -> None:
        self.in_flight -= 1
        self._last_end = max(self._last_end, outcome.end)
        if outcome.ending is Ending.ERROR:
            self._examples.setdefault(outcome.status, outcome.message[:_LONGEST_MESSAGE])
        self._add_events(outcome)
        if outcome.intended < self._warm_at:
            return
        for tally in (self.total, self._tenants[outcome.request.tenant]):
            tally.add(outcome, self._targets)
        if outcome.ending in (Ending.OK, Ending.CANCELLED):
            self._add_times(outcome)
        if outcome.ending is Ending.OK:
            self._add_usage(outcome)

    def result(self, planned_s: float | None, rate: float, interrupted: bool) -> Round:
        """The figures. `planned_s`: how long requests were to be sent; None: until so many were."""
        begin, end = self._window(planned_s if not interrupted else None)
        seconds = (end - begin) * SLOT_S
        counts = self.total.counts()
        return Round(
            seed=self._seed,
            window_s=seconds,
            warmup=self._warmup,
            counts=counts,
            rates=Rates(
                offered=counts.intended / seconds,
                ok=self._timeline.between(Event.OK, begin, end) / seconds,
                good=self._timeline.between(Event.GOOD, begin, end) / seconds,
                tokens=self._timeline.between(Event.TOKENS, begin, end) / seconds,
                prompt_tokens=self._timeline.between(Event.PROMPT_TOKENS, begin, end) / seconds,
            ),
            tokens=Tokens(
                self._asked, self._prompt, self._cached, self._completion, self._messages, self._without_usage
            ),
            ttft=self.total.ttft.summary(),
            itl=self._itl.summary(),
            tpot=self._tpot.summary(),
            e2e=self.total.e2e.summary(),
            lag=self._lag.summary(),
            tenants=self._tenant_results(),
            series=self._timeline.series(),
            dots=tuple(sorted(self._dots)),
            error_examples=dict(self._examples),
            notes=tuple(self._notes(interrupted)),
            rate=rate,
            interrupted=interrupted,
        )

    def _window(self, planned_s: float | None) -> tuple[int, int]:
        """Slots from the end of the warm-up to the last intended start; to the last end where that says too little."""
        begin = slots_in(self._warmup_s)
        end = slots_in(planned_s if planned_s is not None else self._last_intended - self._begin)
        whole = slots_in(self._last_end - self._begin) + 1
        if planned_s is None and end - begin < _LEAST_PART * (whole - begin):
            end = whole
        return begin, max(end, begin + 1)

    def _add_events(self, outcome: Outcome) -> None:
        """Messages are weighted so that each request's add up to the count its server gave."""
        weight = outcome.tokens / outcome.arrived if outcome.arrived else 0.0
        for at, count in outcome.arrivals:
            self._timeline.add(Event.TOKENS, at, count * weight)
        if outcome.ending is Ending.ERROR:
            self._timeline.add(Event.FAILED, outcome.end)
            return
        self._timeline.add(Event.FINISHED, outcome.end)
        if outcome.ending is Ending.OK:
            self._timeline.add(Event.OK, outcome.end)
            self._timeline.add(Event.GOOD, outcome.end, self._targets.kept_by(outcome))
            self._timeline.add(Event.PROMPT_TOKENS, outcome.end, outcome.prompt_tokens or 0)

    def _add_times(self, outcome: Outcome) -> None:
        for (earlier, _), (later, _) in pairwise(outcome.arrivals):
            self._itl.record(later - earlier)
        if outcome.tpot is not None:
            self._tpot.record(outcome.tpot)
        if outcome.ttft is not None:
            self._add_dot(outcome.intended - self._begin, outcome.ttft)

    def _add_dot(self, second: float, ttft: float) -> None:
        """Reservoir sampling: each request is kept with the same probability."""
        self._seen_dots += 1
        if len(self._dots) < _MOST_DOTS:
            self._dots.append((round(second, 3), ttft))
        elif (place := self._sampler.randrange(self._seen_dots)) < _MOST_DOTS:
            self._dots[place] = (round(second, 3), ttft)

    def _add_usage(self, outcome: Outcome) -> None:
        self._asked += outcome.request.prompt_tokens
        self._prompt += outcome.prompt_tokens or 0
        self._cached += outcome.cached_tokens or 0
        self._completion += outcome.tokens
        self._messages += len(outcome.arrivals)
        self._without_usage += outcome.completion_tokens is None

    def _tenant_results(self) -> tuple[TenantResult, ...]:
        if len(self._names) < 2:
            return ()
        return tuple(
            TenantResult(name, tally.counts(), tally.ttft.summary(), tally.e2e.summary())
            for name, tally in zip(self._names, self._tenants, strict=True)
        )

    def _notes(self, interrupted: bool) -> list[str]:
        """What a reader has to know before trusting the figures."""
        notes, total = [], self.total
        if interrupted:
            notes.append("The run was interrupted; what was running then is counted as abandoned.")
        if (late := self._lag.percentile(99)) > LATE_S:
            notes.append(
                f"The load generator fell behind: 1 % of the requests were sent {late * 1e3:.0f} ms late or more. "
                "That is part of their latency; use a faster machine or a lower rate to measure the server alone."
            )
        if not total.counts().intended:
            notes.append("No request was meant to start after the warm-up.")
        if total.not_sent:
            notes.append(f"{total.not_sent} requests were not sent: the in-flight limit was reached.")
        if total.abandoned and not interrupted:
            notes.append(
                f"{total.abandoned} requests had no end when the wait for answers was over: the true tail is longer."
            )
        if self._without_usage:
            notes.append(f"{self._without_usage} answers came without token counts; one per message is assumed.")
        if not total.ok and not total.counts().all_left:
            notes.append("No request ended well.")
        return notes
