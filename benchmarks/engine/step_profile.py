"""A record per engine step: how long each part of the loop took, and each stage of the model where it tells.

Reaches into the engine's private parts on purpose: it times them, it changes nothing. Must not know: what is done
with the records.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.engine.memory_mailbox import MemoryMailbox, build_in_process
from benchmarks.engine.stopwatch import Stopwatch
from engine_service.core.sampling import SamplingParams
from engine_service.core.stats import StepRecord
from engine_service.engine_config import EngineConfig
from engine_service.loop.frames import encode_frame
from engine_service.loop.messages import Command, Shutdown, StepReport, Submit

PARTS = ("plan", "inputs", "forward", "sample", "store", "result", "apply", "news", "publish")
"""In the order of a step: scheduler.plan; tensors of the batch; the model; drawing tokens; keeping them on the
device; reading them back; scheduler.apply; collecting news; pickling the message."""
# They are computed one a step, when a step has room for just one.
_PREFILLS_PER_WAVE = 4


@dataclass(frozen=True, slots=True)
class Case:
    """`decodes` requests of `context` prompt tokens that then generate; with `prefill`, prompts of that many
    tokens come while they do."""

    decodes: int
    context: int = 100
    prefill: int = 0

    @property
    def name(self) -> str:
        return f"prefill {self.prefill} + {self.decodes}" if self.prefill else f"decode {self.decodes}"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds. `total`: from the end of the step before to the end of this one; `other`: what no part explains."""

    decode_tokens: int
    prefill_tokens: int
    total: float
    parts: dict[str, float]
    stages: dict[str, float]

    @property
    def other(self) -> float:
        return self.total - sum(self.parts.values())


@dataclass(slots=True)
class _Wave:
    """The requests of one case: `late` ones join once all others generate."""

    decodes: int
    first: list[Command]
    late: list[Command]


class StepProfiler:
    """An engine loop in this process with a stopwatch in front of each part. For the plain (not overlapped) loop.

    The model is loaded at construction.
    """

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        self._watch = Stopwatch(time.perf_counter)
        self._waves: list[_Wave] = []
        self._late: list[Command] = []
        self._wanted_decodes = 0
        self._steps: list[StepTimes] = []
        self._next_id = 1
        self._last_end = 0.0
        mailbox = MemoryMailbox(self._next_commands, self._on_report)
        self._loop, ready = build_in_process(config, folder, mailbox)
        self._vocab_size = ready.info.vocab_size
        self._scheduler: Any = self._loop._scheduler
        self.worker: Any = self._loop._worker
        self._model = self._watch_parts()
        # What a step reads of the weights, where the model tells.
        self.weight_bytes: int | None = None if self._model is None else int(self._model.weight_bytes)

    def _watch_parts(self) -> Any:
        """Returns the model when it can tell the times of its stages, else None."""
        batch, runner = self.worker._batch, self.worker._runner
        self._watch.watch(self._scheduler, "plan", "plan")
        self._watch.watch(batch, "take", "inputs")
        self._watch.watch(batch, "step_input", "inputs")
        self._watch.watch(runner, "run", "forward")
        self._watch.watch(self.worker, "_sample", "sample")
        self._watch.watch(batch, "store", "store")
        self._watch.watch(self.worker, "result", "result")
        self._watch.watch(self._scheduler, "apply", "apply")
        self._watch.watch(self._scheduler, "take_news", "news")
        model = getattr(runner, "_model", None)
        return model if hasattr(model, "take_times") else None

    def run(self, cases: Sequence[Case], output_tokens: int, repeats: int) -> dict[Case, list[StepTimes]]:
        """The steps of each case that are of its kind, each case `repeats` times. Ends the loop: call it once."""
        if self._model is not None:
            self._model.take_times(enabled=True)
        self._waves = [self._wave(case, output_tokens) for case in cases for _ in range(repeats)]
        self._loop.run()
        return {case: [step for step in self._steps if _is_of(case, step)] for case in cases}

    def _wave(self, case: Case, output_tokens: int) -> _Wave:
        first = [self._submit(case.context, output_tokens) for _ in range(case.decodes)]
        late = [self._submit(case.prefill, 1) for _ in range(_PREFILLS_PER_WAVE if case.prefill else 0)]
        return _Wave(case.decodes, first, late) if first else _Wave(0, late, [])

    def _submit(self, length: int, max_tokens: int) -> Command:
        identity = self._next_id
        self._next_id += 1
        # Prompts of different requests begin differently, so that none is found in the prefix cache.
        ids = tuple((identity * 7919 + place * 31) % self._vocab_size for place in range(length))
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0, ignore_eos=True)
        return Submit(identity, ids, sampling)

    def _next_commands(self, is_idle: bool) -> list[Command]:
        if not is_idle:
            return self._late_commands()
        if not self._waves:
            return [Shutdown()]
        wave = self._waves.pop(0)
        self._late, self._wanted_decodes = wave.late, wave.decodes
        self._last_end = time.perf_counter()
        return wave.first

    def _late_commands(self) -> list[Command]:
        if not self._late or not self._steps or self._steps[-1].decode_tokens != self._wanted_decodes:
            return []
        commands, self._late = self._late, []
        return commands

    def _on_report(self, report: StepReport) -> None:
        started = time.perf_counter()
        encode_frame(report)
        end = time.perf_counter()
        for news in report.news:
            if news.finish is not None and news.finish.error is not None:
                raise RuntimeError(news.finish.error.message)
        if not report.steps:
            return
        self._watch.add("publish", end - started)
        record: StepRecord = self._scheduler.last_record
        stages = {} if self._model is None else self._model.take_times(enabled=True)
        parts = self._watch.take()
        total = end - self._last_end
        self._steps.append(StepTimes(record.decode_tokens, record.prefill_tokens, total, parts, stages))
        self._last_end = time.perf_counter()


def _is_of(case: Case, step: StepTimes) -> bool:
    return (step.decode_tokens, step.prefill_tokens) == (case.decodes, case.prefill)
