"""Recorded steps as a file in the Chrome trace event format, which Perfetto and chrome://tracing open.

Tracks: the loop's parts of each step, the worker's steps, one row for each request that runs, and counters. Times are
microseconds since the first recorded step. Must not know: how steps are recorded, where the file goes.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from engine_service.loop.step_recorder import Ended, Span, StepTrace

Event = dict[str, Any]

ENGINE, REQUESTS = 1, 2
LOOP, WORKER = 1, 2
_EVENTS_PER_PART = 256


@dataclass(frozen=True, slots=True)
class Recording:
    """`names`: of requests that live. `taken_at`: on the loop's clock, when the steps were read; `wall_time` is the
    same moment in seconds since 1970."""

    steps: Sequence[StepTrace]
    names: dict[int, str]
    taken_at: float
    wall_time: float


@dataclass(slots=True)
class _Stay:
    """A request while it runs, from its first recorded step to its last, or to a preemption."""

    request_id: int
    row: int
    begin: float
    end: float
    args: Event = field(default_factory=dict)


def trace_parts(recording: Recording) -> Iterator[str]:
    """The file's text, part by part (some ten kilobytes each)."""
    base = recording.steps[0].started if recording.steps else recording.taken_at
    began = datetime.fromtimestamp(recording.wall_time - (recording.taken_at - base), UTC)
    facts = {"recorder": "tokenwire", "began": began.isoformat(), "steps": len(recording.steps)}
    yield f'{{"displayTimeUnit": "ms", "otherData": {json.dumps(facts)}, "traceEvents": [\n'
    separator = ""
    for events in _grouped(_Renderer(recording, base).events()):
        yield separator + ",\n".join(json.dumps(event) for event in events)
        separator = ",\n"
    yield "\n]}\n"


def _grouped(events: Iterable[Event]) -> Iterator[list[Event]]:
    group: list[Event] = []
    for event in events:
        group.append(event)
        if len(group) == _EVENTS_PER_PART:
            yield group
            group = []
    if group:
        yield group


class _Renderer:
    def __init__(self, recording: Recording, base: float) -> None:
        self._steps = recording.steps
        self._taken_at = recording.taken_at
        self._base = base
        self._names = dict(recording.names)
        self._names.update((ended[0], ended[1]) for step in recording.steps for ended in step.ended)
        self._stays: dict[int, _Stay] = {}
        self._free_rows: list[int] = []
        self._num_rows = 0
        self._ended: tuple[Ended, ...] = ()
        self._known: dict[int, int] = {}  # tokens at admission

    def events(self) -> Iterator[Event]:
        yield _named("process_name", ENGINE, 0, "engine")
        yield _named("process_name", REQUESTS, 0, "requests")
        yield _named("thread_name", ENGINE, LOOP, "loop")
        yield _named("thread_name", ENGINE, WORKER, "worker")
        last_answer = self._base
        for step in self._steps:
            # A worker takes plans in order: it begins with one when it has it and is done with the one before.
            begin, end = max(step.planned, last_answer), step.answered or self._taken_at
            last_answer = max(end, last_answer)
            yield from self._loop_events(step)
            yield self._worker_event(step, begin, end)
            yield from self._request_events(step, begin, end)
            yield from self._counters(step)
        yield from self._end_stays()
        for stay in sorted(self._stays.values(), key=lambda stay: stay.row):
            yield self._stay_event(stay)
        for row in range(1, self._num_rows + 1):
            yield _named("thread_name", REQUESTS, row, f"row {row:03}")
            yield {**_place("thread_sort_index", REQUESTS, row), "ph": "M", "args": {"sort_index": row}}

    def _loop_events(self, step: StepTrace) -> Iterator[Event]:
        parts = (
            ("plan", step.started, step.planned),
            ("submit", step.planned, step.submitted),
            ("wait", step.asked, step.answered),
            ("apply", step.answered, step.applied),
            ("publish", step.applied, step.published),
        )
        for name, begin, end in parts:
            if begin and end:
                yield self._slice(name, ENGINE, LOOP, begin, end, {"step": step.step})

    def _worker_event(self, step: StepTrace, begin: float, end: float) -> Event:
        self._known.update((item[0], item[2]) for item in step.admitted)
        decodes = [span[2] for place, span in enumerate(step.spans) if not self._is_prefill(step, place, span)]
        args: Event = {
            "step": step.step,
            "tokens": step.num_tokens,
            "decode_requests": len(decodes),
            "decode_tokens": sum(decodes),
            "prefill_requests": len(step.chunks) - len(decodes),
            "prefill_tokens": step.num_tokens - sum(decodes),
        }
        name = f"step {step.step}" if step.is_settled else f"step {step.step} (unfinished)"
        return self._slice(name, ENGINE, WORKER, begin, end, args)

    def _request_events(self, step: StepTrace, begin: float, end: float) -> Iterator[Event]:
        for request_id in step.preempted:
            if (stay := self._stays.pop(request_id, None)) is not None:
                stay.args["preempted"] = True
                yield self._leave(stay)
                yield self._instant("preempted", stay, stay.end)
        admitted = {item[0]: item for item in step.admitted}
        for place, span in enumerate(step.spans):
            request_id, start, length = span
            stay = self._stays.get(request_id) or self._enter(request_id, begin)
            stay.end = end
            args: Event = {"request": self._name(request_id), "step": step.step, "tokens": length, "position": start}
            if request_id in admitted:
                _, prompt, known, cached = admitted[request_id]
                args |= {"prompt_tokens": prompt, "cached_tokens": cached}
                stay.args |= {"prompt_tokens": prompt, "cached_tokens": cached, "known_tokens": known}
            kind = "prefill" if self._is_prefill(step, place, span) else "decode"
            yield self._slice(kind, REQUESTS, stay.row, begin, end, args)
        # The step that was in flight when they ended may have computed for them in vain.
        yield from self._end_stays()
        self._ended = step.ended

    def _end_stays(self) -> Iterator[Event]:
        for request_id, _, reason in self._ended:
            self._known.pop(request_id, None)
            if (stay := self._stays.pop(request_id, None)) is not None:
                stay.args["finish_reason"] = reason
                yield self._leave(stay)

    def _is_prefill(self, step: StepTrace, place: int, span: Span) -> bool:
        """A prompt's last chunk may be one token, planned among decodes; without its admission it passes for one."""
        known = self._known.get(span[0])
        return place >= step.num_decodes if known is None else span[1] < known

    def _counters(self, step: StepTrace) -> Iterator[Event]:
        for time, load in ((step.planned, step.planned_load), (step.applied, step.settled_load)):
            if load is not None:
                running, waiting, used, cached, free = load
                yield self._counter("requests", time, {"running": running, "waiting": waiting})
                yield self._counter("KV blocks", time, {"used": used, "cached": cached, "free": free})

    def _enter(self, request_id: int, begin: float) -> _Stay:
        """In the lowest row that is free."""
        if self._free_rows:
            row = min(self._free_rows)
            self._free_rows.remove(row)
        else:
            self._num_rows += 1
            row = self._num_rows
        stay = self._stays[request_id] = _Stay(request_id, row, begin, begin)
        return stay

    def _leave(self, stay: _Stay) -> Event:
        self._free_rows.append(stay.row)
        return self._stay_event(stay)

    def _stay_event(self, stay: _Stay) -> Event:
        args = {"request": self._name(stay.request_id), **stay.args}
        return self._slice(self._name(stay.request_id), REQUESTS, stay.row, stay.begin, stay.end, args)

    def _name(self, request_id: int) -> str:
        return self._names.get(request_id) or f"request {request_id}"

    def _at(self, time: float) -> float:
        return round((time - self._base) * 1e6, 3)

    def _slice(self, name: str, process: int, track: int, begin: float, end: float, args: Event) -> Event:
        at = self._at(begin)
        # The end is rounded, not the length: parts that touch must not overlap.
        duration = round(max(0.0, self._at(end) - at), 3)
        return {**_place(name, process, track), "ph": "X", "ts": at, "dur": duration, "args": args}

    def _instant(self, name: str, stay: _Stay, time: float) -> Event:
        return {**_place(name, REQUESTS, stay.row), "ph": "i", "s": "t", "ts": self._at(time)}

    def _counter(self, name: str, time: float, values: dict[str, int]) -> Event:
        return {**_place(name, ENGINE, 0), "ph": "C", "ts": self._at(time), "args": values}


def _place(name: str, process: int, track: int) -> Event:
    return {"name": name, "pid": process, "tid": track}


def _named(kind: str, process: int, track: int, name: str) -> Event:
    return {**_place(kind, process, track), "ph": "M", "args": {"name": name}}
