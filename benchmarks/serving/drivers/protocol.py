"""How the harness talks to an engine that runs inside a driver process: one JSON line each way per run.

Standard library only: it runs inside the interpreters of peers. Must not know: any engine.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TextIO

from benchmarks.serving.drivers.closed_run import ClosedRun, Job, Progress
from benchmarks.serving.records import to_json


class StepEngine(Protocol):
    """An engine that is driven from outside."""

    def add(self, job: Job) -> None: ...

    def step(self) -> Iterable[Progress]:
        """Computes, or waits for, some progress."""


class Channel:
    """Lines from and to the harness. What the engine prints goes to stderr, not among them."""

    def __init__(self, source: TextIO, sink: TextIO) -> None:
        self._source = source
        self._sink = sink

    @staticmethod
    def of_process() -> "Channel":
        """Takes this process's stdin and stdout; whatever else writes to stdout from now on meets stderr."""
        sink = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        return Channel(sys.stdin, sink)

    def ready(self, version: str) -> None:
        self._write({"ready": True, "version": version})

    def next_run(self, clock: Callable[[], float]) -> ClosedRun | None:
        """Waits for the harness; None when it is done with us."""
        line = self._source.readline()
        if not line:
            return None
        order = json.loads(line)
        jobs = [Job(job["key"], tuple(job["token_ids"]), job["max_tokens"]) for job in order["jobs"]]
        return ClosedRun(jobs, order["concurrency"], clock)

    def answer(self, run: ClosedRun) -> None:
        self._write({"records": [to_json(record) for record in run.records]})

    def _write(self, message: dict[str, Any]) -> None:
        self._sink.write(json.dumps(message) + "\n")
        self._sink.flush()


def order_line(jobs: Iterable[Job], concurrency: int) -> str:
    """The harness's side of `next_run`."""
    encoded = [{"key": job.key, "token_ids": job.token_ids, "max_tokens": job.max_tokens} for job in jobs]
    return json.dumps({"jobs": encoded, "concurrency": concurrency}) + "\n"


def serve_steps(engine: StepEngine, channel: Channel, version: str) -> None:
    """Runs what the harness orders until it closes our stdin."""
    channel.ready(version)
    while (run := channel.next_run(time.monotonic)) is not None:
        run_steps(engine, run)
        channel.answer(run)


def run_steps(engine: StepEngine, run: ClosedRun) -> None:
    """One closed loop to its end."""
    _submit(engine, run)
    while not run.is_done:
        for progress in engine.step():
            run.note(progress)
        _submit(engine, run)


def _submit(engine: StepEngine, run: ClosedRun) -> None:
    for job in run.take():
        engine.add(job)
