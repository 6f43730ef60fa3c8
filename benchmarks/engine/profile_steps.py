"""Where the time of an engine step goes, part by part and stage by stage, beside the memory floor.

`python -m benchmarks.engine.profile_steps [--threads N] [--decodes 1 8 32] [--prefills 512]`. The engine runs in
this process, without sockets. Must not know: the services.
"""

import argparse
import json
import os
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.engine.read_speed import read_bytes_per_s
from benchmarks.engine.step_profile import PARTS, Case, StepProfiler, StepTimes
from engine_service.config import ENV_PREFIX, EngineSettings
from engine_service.engine_config import EngineConfig, engine_config
from service_runtime.config import load_settings
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder

PROGRAM = "python -m benchmarks.engine.profile_steps"


@dataclass(frozen=True, slots=True)
class Profile:
    """Milliseconds. `least`: of whole steps; `parts` and `stages`: medians. `floor`: to read what a step has to
    read, weights and KV, at the speed of a plain read loop; only for decode steps, which it bounds."""

    case: str
    steps: int
    tokens: int
    median: float
    least: float
    parts: dict[str, float]
    stages: dict[str, float]
    floor: float | None


def profile(
    case: Case, steps: Sequence[StepTimes], bytes_per_s: float, weights: int, kv_per_token: float, generated: int
) -> Profile:
    """ValueError when no step was of that kind."""
    if not steps:
        raise ValueError(f"no step was {case.name}: the budget of a step is too small")
    parts = {part: _median(step.parts.get(part, 0.0) for step in steps) for part in PARTS}
    parts["other"] = _median(step.other for step in steps)
    stages = {name: _median(step.stages[name] for step in steps) for name in steps[0].stages}
    read = weights + case.decodes * (case.context + generated / 2) * kv_per_token
    floor = None if case.prefill else read / bytes_per_s * 1e3
    totals = [step.total for step in steps]
    tokens = case.decodes + case.prefill
    return Profile(case.name, len(steps), tokens, _median(totals), min(totals) * 1e3, parts, stages, floor)


def _median(seconds: Iterable[float]) -> float:
    return statistics.median(seconds) * 1e3


def table(profiles: Sequence[Profile]) -> str:
    """Markdown: a column per case, a row per part, then per stage of the model."""
    rows = [
        ("steps", [str(p.steps) for p in profiles]),
        ("ms per step: median", [f"{p.median:.2f}" for p in profiles]),
        ("least", [f"{p.least:.2f}" for p in profiles]),
        ("memory floor", ["" if p.floor is None else f"{p.floor:.2f}" for p in profiles]),
        ("least / floor", ["" if p.floor is None else f"{p.least / p.floor:.2f}" for p in profiles]),
        ("us per token", [f"{p.median / p.tokens * 1e3:.0f}" for p in profiles]),
        *((part, [f"{p.parts[part]:.3f}" for p in profiles]) for part in profiles[0].parts),
        *((f"forward: {stage}", [f"{p.stages[stage]:.2f}" for p in profiles]) for stage in profiles[0].stages),
    ]
    lines = ["| | " + " | ".join(p.case for p in profiles) + " |", "|---|" + "---|" * len(profiles)]
    return "\n".join(lines + [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows])


def parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Own options, and what is left: flags of the engine."""
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, epilog="Other flags go to the engine.", allow_abbrev=False
    )
    parser.add_argument("--decodes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prefills", type=int, nargs="*", default=[512], help="each beside 8 decodes")
    parser.add_argument("--context", type=int, default=100, help="prompt tokens of the decoding requests")
    parser.add_argument("--output-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--json", type=Path, help="file for the figures")
    return parser.parse_known_args(arguments)


def config_of(options: argparse.Namespace, flags: Sequence[str], cases: Sequence[Case]) -> EngineConfig:
    """The engine's own settings; every case must fit into one step, and steps must not overlap."""
    own = ["--model", options.model, "--threads", str(options.threads), *flags]
    settings = load_settings(EngineSettings, program=PROGRAM, env_prefix=ENV_PREFIX, arguments=own)
    config = engine_config(settings)
    budget = max(config.scheduling.step_token_budget, *(case.decodes + case.prefill for case in cases))
    scheduling = replace(
        config.scheduling,
        step_token_budget=budget,
        prefill_chunk_size=budget,
        prefill_per_decode=0,
        overlap=False,
    )
    return replace(config, scheduling=scheduling)


def weights_on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def measure(options: argparse.Namespace, flags: Sequence[str]) -> tuple[list[Profile], Mapping[str, object]]:
    """The profiles, and what they were measured with."""
    cases = [Case(count, options.context) for count in options.decodes]
    cases += [Case(8, options.context, length) for length in options.prefills]
    folder = resolve_model_folder(options.model)
    speed_before = read_bytes_per_s(options.threads)
    profiler = StepProfiler(config_of(options, flags, cases), folder)
    info = profiler.worker.info
    weights = profiler.weight_bytes or weights_on_disk(folder)
    found = profiler.run(cases, options.output_tokens, options.repeats)
    # The faster one: it is a limit, and neighbours only slow it down.
    speed = max(speed_before, read_bytes_per_s(options.threads))
    kv_per_token = info.kv_bytes_per_block / info.block_size
    profiles = [
        profile(case, steps, speed, weights, kv_per_token, options.output_tokens) for case, steps in found.items()
    ]
    facts = {
        "read_gb_per_s": speed / 1e9,
        "weight_bytes": weights,
        "kv_bytes_per_token": kv_per_token,
        "threads": options.threads,
        "backend": info.backend,
        "dtype": info.dtype,
        "load_average": os.getloadavg(),
    }
    return profiles, facts


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    options, flags = parse(sys.argv[1:] if arguments is None else arguments)
    profiles, facts = measure(options, flags)
    shown = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in facts.values())
    print(", ".join(f"{name} {value}" for name, value in zip(facts, shown, strict=True)))
    print(table(profiles))
    if options.json:
        options.json.write_text(json.dumps({"facts": facts, "profiles": [asdict(p) for p in profiles]}, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
