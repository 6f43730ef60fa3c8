"""Replicas in virtual time: the real scheduler of each, the step model's seconds between its steps, no waiting.

Must not know: sockets, the wall clock, what the figures are for.
"""

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from engine_service.core.outcome import Refusal
from engine_service.core.request import Request
from engine_service.core.sampling import SamplingParams
from engine_service.core.scheduler import Scheduler, SchedulerConfig
from engine_service.simulated.step_model import StepModel, StepWork
from engine_service.simulated.worker import SimulatedWorker

_VOCAB_SIZE = 32_768


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request to come: seconds from the start, its prompt, how many tokens it generates."""

    at: float
    prompt: Sequence[int]
    output_tokens: int


@dataclass(slots=True)
class Record:
    """What became of an arrival; times in seconds from the start. Refused: `refusal` is set and nothing else."""

    arrival: Arrival
    refusal: Refusal | None = None
    first_token_at: float | None = None
    last_token_at: float = 0.0
    longest_gap: float = 0.0
    num_tokens: int = 0

    def take(self, num_tokens: int, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self.longest_gap = max(self.longest_gap, now - self.last_token_at)
        self.last_token_at = now
        self.num_tokens += num_tokens

    @property
    def ttft(self) -> float:
        """Seconds to the first token; infinite for a request that got none."""
        return float("inf") if self.first_token_at is None else self.first_token_at - self.arrival.at

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first."""
        if self.first_token_at is None:
            return float("inf")
        return (self.last_token_at - self.first_token_at) / max(1, self.num_tokens - 1)


class VirtualEngine:
    """One replica. `outstanding`: tokens to compute and to generate, as a router counts them."""

    def __init__(self, config: SchedulerConfig, model: StepModel) -> None:
        self.now = 0.0
        self.busy_seconds = 0.0
        self.outstanding = 0
        self._model = model
        self._scheduler = Scheduler(config)
        self._worker = SimulatedWorker(
            model, vocab_size=_VOCAB_SIZE, eos_token_ids=frozenset(), clock=lambda: self.now, sleep=self._never
        )
        self._records: dict[int, Record] = {}
        self._is_stepping = False

    def submit(self, number: int, record: Record, now: float) -> None:
        arrival = record.arrival
        sampling = SamplingParams(max_tokens=arrival.output_tokens, seed=number, ignore_eos=True)
        request = Request(number, arrival.prompt, sampling, arrival=now)
        record.refusal = self._scheduler.submit(request)
        if record.refusal is None:
            self._records[number] = record
            self.outstanding += len(arrival.prompt) + arrival.output_tokens

    def start_step(self, now: float) -> float | None:
        """When the step that starts now ends; None while one runs and when there is nothing to do."""
        if self._is_stepping:
            return None
        self.now = now
        plan = self._scheduler.plan(now)
        if plan is None:
            return None
        self._worker.submit(plan)
        self._is_stepping = True
        seconds = self._model.seconds(StepWork.of(plan.chunks))
        self.busy_seconds += seconds
        return now + seconds

    def end_step(self, now: float) -> None:
        self.now = now
        self._is_stepping = False
        self._scheduler.apply(self._worker.result())
        for news in self._scheduler.take_news():
            record = self._records[news.request_id]
            if news.token_ids:
                record.take(len(news.token_ids), now)
            if news.finish is not None:
                del self._records[news.request_id]
                self.outstanding -= len(record.arrival.prompt) + record.arrival.output_tokens

    @staticmethod
    def _never(seconds: float) -> None:
        raise RuntimeError(f"a step was settled {seconds} s before its end")


@dataclass(slots=True)
class Fleet:
    """Engines and the queue of what happens next. Requests go where the least work is outstanding."""

    engines: list[VirtualEngine]
    _events: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _ties: Iterator[int] = field(default_factory=count)

    def run(self, arrivals: Sequence[Arrival]) -> tuple[list[Record], float]:
        """Until all is served: what became of each arrival, and when the last thing happened. Call it once."""
        records = [Record(arrival) for arrival in arrivals]
        for number, record in enumerate(records):
            self._at(record.arrival.at, self._arrival(number, record))
        now = 0.0
        while self._events:
            now, _, happen = heapq.heappop(self._events)
            happen(now)
        return records, now

    def _at(self, time: float, happen: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (time, next(self._ties), happen))

    def _arrival(self, number: int, record: Record) -> Callable[[float], None]:
        def happen(now: float) -> None:
            engine = min(self.engines, key=lambda engine: engine.outstanding)
            engine.submit(number, record, now)
            self._start(engine, now)

        return happen

    def _start(self, engine: VirtualEngine, now: float) -> None:
        end = engine.start_step(now)
        if end is not None:
            self._at(end, lambda time: self._end(engine, time))

    def _end(self, engine: VirtualEngine, now: float) -> None:
        engine.end_step(now)
        self._start(engine, now)
