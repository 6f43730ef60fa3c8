"""Compares targets: the same workload, round by round, one at a time. JSON, a picture and a table.

`python -m benchmarks.serving.compare --targets tokenwire vllm [--rounds N] [--concurrency 1 8 32]`.
Must not know: how a target is started or asked.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks.serving.machine import machine_facts
from benchmarks.serving.picture import draw
from benchmarks.serving.processes import TargetFailed
from benchmarks.serving.rounds import Settings, Turn, counts_of, pause, play
from benchmarks.serving.summary import markdown, plain, summarise
from benchmarks.serving.target_specs import DEFAULT_FILE, BadSpec, Spec, read_specs, with_engine_flags
from benchmarks.serving.targets import ROOT, Target, default_placeholders, running_target
from benchmarks.serving.workload import Shape, WordList
from service_runtime.model_files import DEFAULT_MODEL, ModelNotFound, resolve_model_folder


@dataclass(frozen=True, slots=True)
class Started:
    """What is known of a target once it is ready."""

    version: str
    about: str
    start_s: float


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.compare", description=__doc__)
    parser.add_argument("--targets", nargs="+", default=["tokenwire", "inprocess"], help="names in --file")
    parser.add_argument("--file", type=Path, default=DEFAULT_FILE, help="TOML file of targets")
    parser.add_argument("--peers", default=os.environ.get("TOKENWIRE_PEERS"), help="folder of installed peers")
    parser.add_argument("--baseline", help="target that ratios refer to (default: the last one)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--requests", nargs="+", default=[], metavar="C:N", help="N requests at concurrency C")
    parser.add_argument("--prompt-tokens", type=int, default=100)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--spread", type=float, default=0.0, help="0.5: lengths from half to one and a half times")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=2, help="of every target")
    parser.add_argument("--engine-flags", default="", help="more flags for our engine, in one string")
    parser.add_argument("--seed", type=int, default=None, help="of the prompts (default: a new one)")
    parser.add_argument("--out", type=Path, default=Path(".run/bench/compare"), help="path without suffix")
    return parser.parse_args(arguments)


def settings_of(options: argparse.Namespace) -> Settings:
    """ValueError for what cannot be."""
    return Settings(
        rounds=options.rounds,
        concurrency=tuple(options.concurrency),
        requests=counts_of(options.requests),
        shape=Shape(options.prompt_tokens, options.output_tokens, options.spread),
        seed=random.SystemRandom().getrandbits(31) if options.seed is None else options.seed,
    )


def specs_of(options: argparse.Namespace, model: Path) -> list[Spec]:
    """BadSpec for a target that is not in the file."""
    placeholders = default_placeholders(model, options.threads, options.peers)
    specs = read_specs(options.file, placeholders, options.targets)
    return [with_engine_flags(spec, tuple(options.engine_flags.split())) for spec in specs]


async def compare(
    specs: Sequence[Spec], settings: Settings, model: Path, logs: Path
) -> tuple[dict[str, Started], list[Turn]]:
    """Starts all targets, one after the other, plays the rounds, ends them."""
    words = WordList.of_folder(model)
    targets: dict[str, Target] = {}
    started: dict[str, Started] = {}
    async with AsyncExitStack() as stack:
        for spec in specs:
            _say(f"starting {spec.name} ...")
            begin = time.monotonic()
            target = await stack.enter_async_context(running_target(spec, model, logs))
            started[spec.name] = Started(target.version, spec.about, time.monotonic() - begin)
            _say(f"{spec.name} ({target.version}) is ready after {started[spec.name].start_s:.1f} s")
            pause(target)
            targets[spec.name] = target
        return started, await play(targets, settings, words, _say)


def write_results(
    options: argparse.Namespace, settings: Settings, started: dict[str, Started], turns: Sequence[Turn]
) -> None:
    """OUT.json, OUT.png and OUT.md; the table goes to stdout, too."""
    baseline = options.baseline or options.targets[-1]
    rows = summarise(turns, baseline)
    table = markdown(rows, baseline)
    machine = machine_facts(sys.orig_argv, ROOT)
    results = {
        "machine": machine,
        "settings": settings,
        "baseline": baseline,
        "targets": started,
        "rows": rows,
        "turns": turns,
    }
    out: Path = options.out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(plain(results), indent=1) + "\n")
    out.with_suffix(".md").write_text(table + "\n")
    shape = settings.shape
    title = (
        f"{machine['cpu']}, {machine['cores']} cores; {shape.prompt_tokens} prompt, {shape.output_tokens} output tokens"
    )
    draw(rows, title, out.with_suffix(".png"))
    print(table)
    _say(f"written: {out}.json, .png, .md")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    try:
        model = resolve_model_folder(options.model)
        settings = settings_of(options)
        specs = specs_of(options, model)
        if options.baseline not in (None, *options.targets):
            raise ValueError(f"the baseline {options.baseline} is none of the targets")
        started, turns = asyncio.run(compare(specs, settings, model, options.out.parent / "logs"))
    except (BadSpec, ModelNotFound, TargetFailed, ValueError) as error:
        print(error, file=sys.stderr)
        return 1
    write_results(options, settings, started, turns)
    return 1 if any(turn.measures.errors for turn in turns) else 0


if __name__ == "__main__":
    raise SystemExit(main())
