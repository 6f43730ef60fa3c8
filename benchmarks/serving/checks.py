"""The latency and capacity figures that Tokenwire promises, each checked against its limit in about a minute.

`python -m benchmarks.serving.checks [NAME ...]`; exit code 1 when one is missed. On a quiet machine only.
Must not know: how a check works.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.serving.capacity_checks import busy_neighbour, growth, services_cost, start
from benchmarks.serving.check_tools import Finding, Setting
from benchmarks.serving.latency_checks import cached_prefix, long_prefill, long_queue
from benchmarks.serving.machine import BusyMeter, machine_facts
from benchmarks.serving.processes import TargetFailed
from benchmarks.serving.rounds import counts_of
from benchmarks.serving.summary import plain
from benchmarks.serving.targets import ROOT
from benchmarks.serving.workload import WordList
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder

CHECKS: Mapping[str, Callable[[Setting], Awaitable[list[Finding]]]] = {
    "start": start,
    "cached-prefix": cached_prefix,
    "long-prefill": long_prefill,
    "long-queue": long_queue,
    "busy-neighbour": busy_neighbour,
    "growth": growth,
    "services-cost": services_cost,
}
_LISTEN_S = 1.0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving.checks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all by default: {', '.join(CHECKS)}")
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--engine-flags", default="", help="more flags for the engine, in one string")
    parser.add_argument("--requests", nargs="+", default=[], metavar="C:N", help="N requests at concurrency C")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, default=Path(".run/bench/checks.json"))
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.names if name not in CHECKS]:
        parser.error(f"no check {', '.join(unknown)}: there are {', '.join(CHECKS)}")
    return options


async def run(names: Sequence[str], setting: Setting) -> dict[str, list[Finding]]:
    """One check after the other; one that fails counts as missed."""
    found: dict[str, list[Finding]] = {}
    for name in names:
        meter = BusyMeter()
        await asyncio.sleep(_LISTEN_S)
        print(f"{name} (neighbours use {meter.look():.0%} of the machine) ...", file=sys.stderr, flush=True)
        try:
            found[name] = await CHECKS[name](setting)
        except (RuntimeError, TargetFailed, TimeoutError) as error:
            found[name] = [Finding(f"{name} did not finish", float("nan"), 0.0, "", str(error))]
        for finding in found[name]:
            print(finding.line(), flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    model = resolve_model_folder(options.model)
    setting = Setting(
        model=model,
        words=WordList.of_folder(model),
        logs=options.out.parent / "logs",
        threads=options.threads,
        engine_flags=tuple(options.engine_flags.split()),
        requests=counts_of(options.requests),
        seed=random.SystemRandom().getrandbits(31) if options.seed is None else options.seed,
    )
    found = asyncio.run(run(options.names or list(CHECKS), setting))
    results = {name: [asdict(f) | {"holds": f.holds} for f in findings] for name, findings in found.items()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    machine = machine_facts(sys.orig_argv, ROOT)
    options.out.write_text(json.dumps(plain({"machine": machine, "checks": results}), indent=1) + "\n")
    return 0 if all(finding.holds for findings in found.values() for finding in findings) else 1


if __name__ == "__main__":
    raise SystemExit(main())
