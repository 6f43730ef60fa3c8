"""The last steps of the loop, kept to be looked at: what each planned, how long its parts took, how full the pool was.

Must not know: files, the format of a trace, token ids.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from engine_service.core.outcome import RequestNews
from engine_service.core.plan import Chunk, Plan
from engine_service.core.stats import EngineStats, StepRecord

MAX_CHUNKS = 131_072
"""Of all recorded steps together (some 20 MB): with very many requests fewer steps are kept."""

MAX_ENDED = 4096
"""Requests that may end between two steps and are named with the second."""

CHUNKS_PER_PIECE = 1024
"""A dump is handed out in pieces, one for each turn of the loop: about a millisecond of it."""

Span = tuple[int, int, int]
"""Of a chunk: request id, first position, number of tokens."""

Admitted = tuple[int, int, int, int]
"""Request id, prompt tokens, known tokens (with the completion, after a preemption), cached tokens."""

Load = tuple[int, int, int, int, int]
"""Requests running and waiting; KV blocks used, cached (free with reusable content) and free."""

Ended = tuple[int, str, str]
"""Request id, its name, finish reason."""


@dataclass(slots=True)
class StepTrace:
    """One step; times on the loop's clock, 0 while they are in the future.

    The loop `started` to plan; the plan was `planned`, then `submitted` to the worker. Its result was `asked` for,
    `answered` by the worker, `applied` by the scheduler, and the news `published`. Of the chunks (request id, start,
    length) the first `num_decodes` are decodes. `ended`: requests that did since the step before was published.
    """

    step: int
    started: float
    planned: float
    submitted: float
    num_decodes: int
    chunks: Sequence[Chunk] | Sequence[Span]
    admitted: tuple[Admitted, ...]
    preempted: tuple[int, ...]
    planned_load: Load
    asked: float = 0.0
    answered: float = 0.0
    applied: float = 0.0
    published: float = 0.0
    settled_load: Load | None = None
    ended: tuple[Ended, ...] = ()

    @property
    def is_settled(self) -> bool:
        return self.settled_load is not None

    @property
    def spans(self) -> tuple[Span, ...]:
        return tuple([(chunk[0], chunk[1], chunk[2]) for chunk in self.chunks])

    @property
    def num_tokens(self) -> int:
        return sum(chunk[2] for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class DumpPiece:
    """A part of what was recorded, the oldest first. `names`: of requests that live, with the last piece."""

    number: int  # of the dump
    steps: tuple[StepTrace, ...]
    names: tuple[tuple[int, str], ...] = ()
    is_last: bool = False


class Recorder(Protocol):
    """What the loop tells of each step. Everything happens on the loop's thread."""

    @property
    def is_dumping(self) -> bool: ...

    def arrived(self, request_id: int, name: str) -> None: ...

    def planned(self, plan: Plan, record: StepRecord | None, times: tuple[float, float]) -> None:
        """Before the worker gets it. `times`: started, planned."""

    def submitted(self, step: int, now: float) -> None: ...

    def ended(self, news: Sequence[RequestNews]) -> None:
        """News with finishes among them."""

    def settled(self, step: int, times: tuple[float, float, float, float], stats: EngineStats) -> None:
        """`times`: asked, answered, applied, published."""

    def begin_dump(self, number: int, last_steps: int | None) -> None: ...

    def next_piece(self) -> DumpPiece | None:
        """The next part of the dump that was begun, if one was."""


class NullRecorder:
    """Keeps nothing."""

    is_dumping = False

    def arrived(self, request_id: int, name: str) -> None: ...

    def planned(self, plan: Plan, record: StepRecord | None, times: tuple[float, float]) -> None: ...

    def submitted(self, step: int, now: float) -> None: ...

    def ended(self, news: Sequence[RequestNews]) -> None: ...

    def settled(self, step: int, times: tuple[float, float, float, float], stats: EngineStats) -> None: ...

    def begin_dump(self, number: int, last_steps: int | None) -> None: ...

    def next_piece(self) -> DumpPiece | None:
        return None


class StepRecorder:
    """A ring with a place for each of the last `size` steps and for those in flight. A step costs a few microseconds:
    what the plan holds anyway is kept, and only looked at in a dump."""

    def __init__(self, size: int, max_chunks: int = MAX_CHUNKS) -> None:
        self._ring: list[StepTrace | None] = [None] * (size + 2)
        self._max_chunks = max_chunks
        self._num_chunks = 0
        self._oldest = 1
        self._newest = 0
        self._names: dict[int, str] = {}  # of live requests
        self._ended: deque[Ended] = deque(maxlen=MAX_ENDED)
        self._dump: list[StepTrace] | None = None
        self._dump_number = 0

    @property
    def is_dumping(self) -> bool:
        return self._dump is not None

    def arrived(self, request_id: int, name: str) -> None:
        self._names[request_id] = name

    def planned(self, plan: Plan, record: StepRecord | None, times: tuple[float, float]) -> None:
        if record is None:
            return
        step, chunks = plan.step, plan.chunks
        place = step % len(self._ring)
        if (old := self._ring[place]) is not None:
            self._forget(old.step)
        self._ring[place] = StepTrace(
            step,
            *times,
            0.0,
            record.num_decodes,
            chunks,
            _admitted(plan) if plan.new else (),
            record.preempted,
            (record.running, record.waiting, record.used_blocks, record.cached_blocks, record.free_blocks),
        )
        self._newest = step
        self._num_chunks += len(chunks)
        while self._num_chunks > self._max_chunks and self._oldest < step:
            self._forget(self._oldest)

    def submitted(self, step: int, now: float) -> None:
        trace = self._ring[step % len(self._ring)]
        if trace is not None:
            trace.submitted = now

    def ended(self, news: Sequence[RequestNews]) -> None:
        for item in news:
            if item.finish is not None and (name := self._names.pop(item.request_id, None)) is not None:
                self._ended.append((item.request_id, name, item.finish.reason.value))

    def settled(self, step: int, times: tuple[float, float, float, float], stats: EngineStats) -> None:
        trace = self._ring[step % len(self._ring)]
        if trace is None or trace.step != step:
            return
        trace.asked, trace.answered, trace.applied, trace.published = times
        trace.settled_load = (
            stats.running,
            stats.waiting,
            stats.used_blocks,
            stats.cached_blocks,
            stats.free_blocks,
        )
        if self._ended:
            trace.ended = tuple(self._ended)
            self._ended.clear()

    def snapshot(self) -> list[StepTrace]:
        """What is recorded, the oldest step first. Also from another thread, when the loop hangs."""
        steps = range(self._oldest, self._newest + 1)
        found = (self._ring[step % len(self._ring)] for step in steps)
        return [trace for trace in found if trace is not None]

    def live_names(self) -> tuple[tuple[int, str], ...]:
        return tuple(self._names.items())

    def begin_dump(self, number: int, last_steps: int | None) -> None:
        recorded = self.snapshot()
        self._dump = recorded if last_steps is None else recorded[max(0, len(recorded) - last_steps) :]
        self._dump_number = number

    def next_piece(self) -> DumpPiece | None:
        if self._dump is None:
            return None
        num_steps = num_chunks = 0
        while num_steps < len(self._dump) and num_chunks <= CHUNKS_PER_PIECE:
            num_chunks += 1 + len(self._dump[num_steps].chunks)
            num_steps += 1
        steps = tuple(packed(trace) for trace in self._dump[:num_steps])
        del self._dump[:num_steps]
        if self._dump:
            return DumpPiece(self._dump_number, steps)
        self._dump = None
        return DumpPiece(self._dump_number, steps, self.live_names(), is_last=True)

    def _forget(self, step: int) -> None:
        place = step % len(self._ring)
        if (trace := self._ring[place]) is not None:
            self._num_chunks -= len(trace.chunks)
            self._ring[place] = None
        self._oldest = max(self._oldest, step + 1)


def packed(trace: StepTrace) -> StepTrace:
    """A copy that the loop does not change any more, with plain tuples: they pickle several times faster."""
    return replace(trace, chunks=trace.spans)


def _admitted(plan: Plan) -> tuple[Admitted, ...]:
    """A request's first chunk starts behind what was cached of it."""
    starts = {chunk.request_id: chunk.start for chunk in plan.chunks}
    return tuple(
        (new.request_id, new.prompt_length, len(new.token_ids), starts.get(new.request_id, 0)) for new in plan.new
    )
