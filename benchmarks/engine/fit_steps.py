"""Measures engine steps of many shapes on this machine and fits the step model of the simulated worker to them.

`python -m benchmarks.engine.fit_steps --out step-model.json [--threads N] [engine flags]`. The engine runs in this
process, without sockets. Must not know: the services, what the model is used for.
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.engine.memory_mailbox import MemoryMailbox, build_in_process
from engine_service.config import ENV_PREFIX, EngineSettings
from engine_service.core.plan import Plan
from engine_service.core.sampling import SamplingParams
from engine_service.engine_config import EngineConfig, engine_config
from engine_service.loop.messages import Command, Shutdown, StepReport, Submit
from engine_service.simulated.fitting import MeasuredStep, fit
from engine_service.simulated.step_model import StepWork
from service_runtime.config import load_settings
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder

PROGRAM = "python -m benchmarks.engine.fit_steps"


@dataclass(frozen=True, slots=True)
class Wave:
    """Requests that come at once: `decodes` of them, each with a prompt of `context` tokens."""

    decodes: int
    context: int


_SHAPES = ((1, 32), (4, 32), (16, 32), (64, 32), (1, 256), (4, 256), (16, 256), (1, 1024), (4, 1024), (1, 4000))
WAVES = tuple(Wave(decodes, context) for decodes, context in _SHAPES)


class StepMeter:
    """An engine loop in this process; notes what each step computed and how long the loop took for it."""

    def __init__(self, config: EngineConfig, folder: Path, output_tokens: int) -> None:
        self.steps: list[MeasuredStep] = []
        self._output_tokens = output_tokens
        self._waves: list[Wave] = []
        self._next_id = 1
        self._plans: list[Plan] = []
        self._loop, ready = build_in_process(config, folder, MemoryMailbox(self._next_commands, self._on_report))
        self._vocab_size = ready.info.vocab_size
        self._listen()

    def _listen(self) -> None:
        """The plans, as the loop hands them to its worker."""
        worker: Any = self._loop._worker
        submit = worker.submit

        def listening(plan: Plan) -> None:
            self._plans.append(plan)
            submit(plan)

        worker.submit = listening

    def run(self, waves: Sequence[Wave]) -> None:
        """Each wave to its end before the next. Call it once."""
        self._waves = list(waves)
        self._loop.run()

    def _next_commands(self, is_idle: bool) -> list[Command]:
        if not is_idle:
            return []
        if not self._waves:
            return [Shutdown()]
        wave = self._waves.pop(0)
        return [self._submit(wave.context) for _ in range(wave.decodes)]

    def _submit(self, length: int) -> Command:
        identity = self._next_id
        self._next_id += 1
        # Prompts of different requests begin differently, so that none is found in the prefix cache.
        ids = tuple((identity * 7919 + place * 31) % self._vocab_size for place in range(length))
        return Submit(
            identity, ids, SamplingParams(max_tokens=self._output_tokens, seed=0, temperature=0.0, ignore_eos=True)
        )

    def _on_report(self, report: StepReport) -> None:
        for step in report.steps:
            work = StepWork.of(self._plans.pop(0).chunks)
            if work.decode_rows + work.prefill_tokens:
                self.steps.append(MeasuredStep(work, step.seconds))


def least_of_equal(steps: Sequence[MeasuredStep]) -> list[MeasuredStep]:
    """One step for each kind of work (contexts within a twentieth are equal): the quickest, neighbours disturb all."""
    best: dict[tuple[int, ...], MeasuredStep] = {}
    for step in steps:
        work = step.work
        key = (work.decode_rows, work.prefill_tokens, _rounded(work.decode_context), _rounded(work.prefill_context))
        if key not in best or step.seconds < best[key].seconds:
            best[key] = step
    return list(best.values())


def _rounded(number: int) -> int:
    digits = max(0, number.bit_length() - 4)
    return number >> digits << digits


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own options, and what is left: flags of the engine."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, epilog="Other flags go to the engine.", allow_abbrev=False
    )
    parser.add_argument("--out", type=Path, required=True, help="file for the step model")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output-tokens", type=int, default=24)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    return parser.parse_known_args(arguments)


def config_of(options: argparse.Namespace, flags: Sequence[str]) -> EngineConfig:
    """The engine's own settings; steps must not overlap, and no prompt is found again."""
    own = ["--model", options.model, "--threads", str(options.threads), *flags]
    config = engine_config(load_settings(EngineSettings, program=PROGRAM, env_prefix=ENV_PREFIX, arguments=own))
    return replace(
        config,
        scheduling=replace(config.scheduling, overlap=False),
        cache=replace(config.cache, prefix_cache=False),
    )


def main() -> int:
    options, flags = parse(sys.argv[1:])
    config = config_of(options, flags)
    meter = StepMeter(config, resolve_model_folder(options.model), options.output_tokens)
    meter.run([*WAVES[:1], *(wave for _ in range(options.repeats) for wave in WAVES)])
    steps = least_of_equal(meter.steps[options.output_tokens :])
    found = fit(steps)
    found.model.save(
        options.out,
        {
            "model": options.model,
            "threads": options.threads,
            "machine": platform.processor() or platform.machine(),
            "steps": len(steps),
            "median_error": round(found.median_error, 4),
            "worst_error": round(found.worst_error, 4),
        },
    )
    print(
        f"{len(steps)} kinds of steps of {len(meter.steps):,}; relative error: median {found.median_error:.1%}, ",
        end="",
    )
    print(f"worst {found.worst_error:.0%}")
    print(options.out.read_text(), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
