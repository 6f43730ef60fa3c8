"""The step recorder in the loop, and its trace: read independently, it says what the worker was really given."""

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.core.sampling import SamplingParams
from engine_service.core.scheduler import Scheduler, SchedulerConfig
from engine_service.core.stats import EngineStats
from engine_service.loop.engine_loop import EngineLoop
from engine_service.loop.frames import FrameDecoder, encode_frame
from engine_service.loop.messages import Command, DumpSteps, StepReport, Submit
from engine_service.loop.outbox import Outbox
from engine_service.loop.step_dump import MAX_FILES, StepDump
from engine_service.loop.step_recorder import DumpPiece, StepRecorder, packed
from engine_service.loop.trace_events import Recording, trace_parts
from tests.fixtures.scripted_engine import SMALL, ScriptedWorker, limits_of
from tests.fixtures.trace_format import check_trace, chunks, counters, track
from tests.unit.loop.test_engine_loop import ScriptedMailbox

TIGHT = SchedulerConfig(
    block_size=4,
    num_blocks=12,
    step_token_budget=16,
    prefill_chunk_size=8,
    max_num_requests=4,
    max_waiting_requests=64,
    max_waiting_tokens=10_000,
    max_model_len=40,
    eos_token_ids=frozenset({0}),
    prefix_cache=True,
)


class TickingClock:
    """Each reading is a microsecond and a bit later."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        self.now += 0.000_001_7
        return self.now


def submit(request_id: int, prompt: list[int], max_tokens: int) -> Submit:
    sampling = SamplingParams(max_tokens, seed=1, temperature=0.0)
    return Submit(request_id, tuple(prompt), sampling, name=f"name-{request_id}")


def run(
    batches: list[list[Command]], recorder: StepRecorder, *, overlap: bool = False, config: SchedulerConfig = SMALL
) -> tuple[list[StepReport], ScriptedWorker, TickingClock]:
    clock, worker, mailbox = TickingClock(), ScriptedWorker(), ScriptedMailbox(batches)
    scheduler = Scheduler(config)
    EngineLoop(
        scheduler, worker, mailbox, limits=limits_of(config), clock=clock, overlap=overlap, recorder=recorder
    ).run()
    return mailbox.reports, worker, clock


def trace_of(recorder: StepRecorder, clock: TickingClock) -> dict[str, object]:
    steps = [packed(step) for step in recorder.snapshot()]
    recording = Recording(steps, dict(recorder.live_names()), clock(), 1_000_000.0)
    trace = json.loads("".join(trace_parts(recording)))
    check_trace(trace)
    return dict(trace)


requests = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9), st.integers(0, 3)), min_size=1, max_size=12)


@settings(max_examples=25, deadline=None)
@given(requests=requests, overlap=st.booleans(), is_tight=st.booleans())
def test_the_trace_tells_what_the_worker_was_given(
    requests: list[tuple[int, int, int]], overlap: bool, is_tight: bool
) -> None:
    """Token by token, with preemptions and cache hits; requests join at different steps."""
    batches: list[list[Command]] = []
    for request_id, (length, max_tokens, pause) in enumerate(requests, start=1):
        batches += [[] for _ in range(pause)] + [[submit(request_id, list(range(1, length + 1)), max_tokens)]]
    config, recorder = TIGHT if is_tight else SMALL, StepRecorder(10_000)
    reports, worker, clock = run(batches, recorder, overlap=overlap, config=config)
    trace = trace_of(recorder, clock)

    given_tokens = Counter({f"name-{c.request_id}": 0 for plan in worker.plans for c in plan.chunks})
    for plan in worker.plans:
        for chunk in plan.chunks:
            given_tokens[f"name-{chunk.request_id}"] += chunk.length
    told: Counter[str] = Counter()
    for chunk_event in chunks(trace):
        told[chunk_event["args"]["request"]] += chunk_event["args"]["tokens"]
    assert told == given_tokens
    steps = track(trace, "engine", "worker")
    assert [step["args"]["tokens"] for step in steps] == [plan.num_tokens for plan in worker.plans]
    last: EngineStats = reports[-1].stats
    prefills = sum(e["args"]["tokens"] for e in chunks(trace) if e["name"] == "prefill")
    assert sum(step["args"]["prefill_tokens"] for step in steps) == prefills
    if last.preemptions == 0 and not overlap:
        # Every position but the last token's is computed once, unless it was cached; decodes are what follows.
        assert prefills == sum(length for length, _, _ in requests) - last.cached_tokens
    total = config.num_blocks
    assert all(sum(values.values()) == total for values in counters(trace, "KV blocks"))
    assert counters(trace, "KV blocks")[-1]["used"] == 0
    assert counters(trace, "requests")[-1] == {"running": 0, "waiting": 0}
    preempted = [e for e in trace["traceEvents"] if e["name"] == "preempted"]  # type: ignore[attr-defined]
    assert len(preempted) == last.preemptions


def test_the_parts_of_a_step_follow_each_other() -> None:
    recorder = StepRecorder(10)
    _, worker, clock = run([[submit(1, [5, 6, 7], 4)]], recorder)
    trace = trace_of(recorder, clock)
    names = [(part["name"], part["args"]["step"]) for part in track(trace, "engine", "loop")]
    parts = ("plan", "submit", "wait", "apply", "publish")
    assert names == [(part, plan.step) for plan in worker.plans for part in parts]
    (row,) = [event for event in track(trace, "requests", "row 001") if event["name"] == "name-1"]
    facts = {"request": "name-1", "prompt_tokens": 3, "cached_tokens": 0, "known_tokens": 3, "finish_reason": "length"}
    assert row["args"] == facts
    inside = [event["name"] for event in track(trace, "requests", "row 001") if event is not row]
    assert inside == ["prefill", "decode", "decode", "decode"]


@given(size=st.integers(1, 12), overlap=st.booleans())
@settings(max_examples=20, deadline=None)
def test_the_last_steps_are_kept_and_no_more(size: int, overlap: bool) -> None:
    recorder = StepRecorder(size)
    _, worker, clock = run([[submit(1, [5, 6, 7], 30)]], recorder, overlap=overlap)
    kept = [step.step for step in recorder.snapshot()]
    assert kept == [plan.step for plan in worker.plans][-len(kept) :]
    assert size <= len(kept) <= size + 2
    assert all(step.is_settled for step in recorder.snapshot())
    trace_of(recorder, clock)


def test_very_many_chunks_shorten_what_is_kept() -> None:
    recorder = StepRecorder(100, max_chunks=10)
    run([[submit(number, [number, 6], 20) for number in range(1, 5)]], recorder)
    kept = recorder.snapshot()
    assert 0 < sum(len(step.chunks) for step in kept) <= 10
    assert kept[-1].step > 15


@pytest.mark.parametrize("last_steps", [None, 7, 100_000])
def test_a_dump_comes_in_pieces_beside_the_news(last_steps: int | None) -> None:
    """Also when the loop is idle, over the wire, and merged for a slow front."""
    recorder = StepRecorder(300)
    waves: list[list[Command]] = [[submit(wave + n, [wave + n, 6], 100) for n in range(8)] for wave in (1, 21)]
    batches = [waves[0], *([] for _ in range(150)), waves[1], *([] for _ in range(150)), [DumpSteps(3, last_steps)]]
    reports, worker, _ = run(batches, recorder)
    assert len(reports[-1].dump) == 1  # a piece at a time
    outbox = Outbox()
    for report in reports:
        outbox.add(report)
    (merged,) = FrameDecoder().feed(encode_frame(outbox.take()))
    assert isinstance(merged, StepReport)
    steps = [step for piece in merged.dump for step in piece.steps]
    expected = [packed(step) for step in recorder.snapshot()]
    assert len(expected) == len(worker.plans) > 200
    assert steps == (expected if last_steps is None else expected[-last_steps:])
    assert [piece.is_last for piece in merged.dump] == ([True] if last_steps == 7 else [False, True])


def test_a_second_dump_ends_the_first() -> None:
    recorder = StepRecorder(10)
    old, new = DumpPiece(1, ()), DumpPiece(2, (), is_last=True)
    outbox, (report, *_) = Outbox(), run([[submit(1, [5], 2)]], recorder)[0]
    for piece in (old, new):
        outbox.add(StepReport((), report.stats, dump=(piece,)))
    merged = outbox.take()
    assert merged is not None
    assert merged.dump == (new,)


def test_the_step_that_the_worker_fails_in_is_on_record(tmp_path: Path) -> None:
    recorder, clock, worker = StepRecorder(10), TickingClock(), ScriptedWorker(poison=9)
    mailbox = ScriptedMailbox([[submit(1, [5, 6], 9)], [], [submit(2, [9], 9)]])
    loop = EngineLoop(
        Scheduler(SMALL), worker, mailbox, limits=limits_of(SMALL), clock=clock, overlap=False, recorder=recorder
    )
    with pytest.raises(RuntimeError, match="the device is lost"):
        loop.run()
    told: list[Path | OSError] = []
    StepDump(recorder, tmp_path, clock, told.append).write()
    (file,) = tmp_path.iterdir()
    assert told == [file]
    trace = json.loads(file.read_text())
    check_trace(trace)
    last = track(trace, "engine", "worker")[-1]
    assert last["name"] == f"step {worker.plans[-1].step} (unfinished)"
    in_it = {event["args"]["request"] for event in chunks(trace) if event["args"]["step"] == last["args"]["step"]}
    assert in_it == {"name-1", "name-2"}


def test_the_newest_files_are_kept(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("mine")
    told: list[Path | OSError] = []
    dump = StepDump(StepRecorder(2), tmp_path, TickingClock(), told.append)
    for _ in range(MAX_FILES + 3):
        dump.write()
    assert set(tmp_path.glob("steps-*")) == set(told[-MAX_FILES:])
    assert (tmp_path / "notes.json").read_text() == "mine"


def test_a_folder_that_is_gone_is_said(tmp_path: Path) -> None:
    told: list[Path | OSError] = []
    StepDump(StepRecorder(2), tmp_path / "gone", TickingClock(), told.append).write()
    assert isinstance(told[0], OSError)
