"""What LoRA adapters cost: tokens per second without any, of the model beside adapters, and of four adapters at once.

`python -m benchmarks.serving.lora_cost [--rounds N] [--concurrency 8]`. Two engines with the same model, one with four
random adapters of all linear layers, and a tokenizer service over each; only one of them has work at a time. The same
questions are asked in three ways, group by group, in turns. The engine's CPU time is told beside the time on the clock:
it is what to look at where other processes run. Must not know: how an adapter is applied.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.serving.machine import machine_facts
from benchmarks.serving.processes import GroupProcess
from benchmarks.serving.quoting import inventing
from benchmarks.serving.random_adapters import write_adapter
from benchmarks.serving.services import start_services
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tokenwire_client import AsyncClient, Message, Sampling

NAMES = ("red", "green", "blue", "grey")
BASE = ("",)
PLAIN, BESIDE, ADAPTERS = "without --lora", "beside adapters", "four adapters"
WAYS = (PLAIN, BESIDE, ADAPTERS)
# No drafts: how many are right differs from text to text, and so would the time.
FLAGS = ("--speculation=off", "--kv-cache-memory=512MiB")
_START_S = 120.0


@dataclass(frozen=True, slots=True)
class Way:
    """Which service is asked, for which models in turn, and the process of its engine."""

    client: AsyncClient
    engine: GroupProcess
    models: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Round:
    """By way, of the same questions: tokens per second, and per CPU second of the engine."""

    per_second: dict[str, float]
    per_cpu_second: dict[str, float]


async def _group(way: Way, seed: int, concurrency: int, max_tokens: int) -> tuple[float, float, int]:
    """Asked at the same time; seconds until the last answer was complete, the engine's CPU seconds, all tokens."""
    begin, cpu = time.perf_counter(), way.engine.cpu_s()
    calls = []
    for place in range(concurrency):
        sampling = Sampling(max_tokens=max_tokens, temperature=1.0, seed=seed + place, ignore_eos=True)
        messages = [Message("user", inventing(seed + place).text)]
        calls.append(way.client.chat(messages, sampling, model=way.models[place % len(way.models)]).result())
    answers = await asyncio.gather(*calls)
    took = time.perf_counter() - begin
    return took, way.engine.cpu_s() - cpu, sum(len(answer.token_ids) for answer in answers)


async def _round(ways: dict[str, Way], groups: int, first_seed: int, options: argparse.Namespace) -> Round:
    seconds, cpu, tokens = (dict.fromkeys(WAYS, 0.0) for _ in range(3))
    for number in range(groups):
        seed = first_seed + number * options.concurrency
        turn = number % len(WAYS)
        for name in (*WAYS[turn:], *WAYS[:turn]):
            took, used, count = await _group(ways[name], seed, options.concurrency, options.max_tokens)
            seconds[name] += took
            cpu[name] += used
            tokens[name] += count
    return Round(*({name: round(tokens[name] / spent[name], 1) for name in WAYS} for spent in (seconds, cpu)))


async def run(options: argparse.Namespace, scratch: Path) -> list[Round]:
    """The rounds, printed as they end."""
    model = resolve_model_folder(DEFAULT_MODEL)
    rounds: list[Round] = []
    async with AsyncExitStack() as stack:
        ways = await _start(model, scratch, options, stack)
        await _round(ways, 1, 1, options)
        for number in range(options.rounds):
            rounds.append(await _round(ways, options.groups, 1000 * (1 + number), options))
            print(_line(rounds[-1]), flush=True)
    return rounds


async def _start(model: Path, scratch: Path, options: argparse.Namespace, stack: AsyncExitStack) -> dict[str, Way]:
    deadline = time.monotonic() + _START_S
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}

    def started(process: GroupProcess) -> None:
        stack.push_async_callback(process.stop)

    for seed, name in enumerate(NAMES, 1):
        write_adapter(scratch / name, model, options.rank, seed)
    named = tuple(f"--lora={name}={scratch / name}" for name in NAMES)
    asked = []
    common = (*FLAGS, *options.engine_flags)
    for log, flags in (("plain", common), ("lora", (*common, *named))):
        services = await start_services(model, scratch / log, flags, (), environment, deadline, started)
        client = await stack.enter_async_context(AsyncClient(services.tokenizer))
        asked.append((client, services.engine.process))
    plain, lora = asked
    return {PLAIN: Way(*plain, BASE), BESIDE: Way(*lora, BASE), ADAPTERS: Way(*lora, NAMES)}


def _line(round_: Round) -> str:
    parts = [f"{way} {speed:.1f} ({round_.per_cpu_second[way]:.1f})" for way, speed in round_.per_second.items()]
    return "tokens/s (per CPU second of the engine): " + ", ".join(parts)


def summary(rounds: Sequence[Round]) -> str:
    """The ratios to the engine without adapters: medians, and each round's."""
    lines = []
    for what, figures in (
        ("tokens/s", [each.per_second for each in rounds]),
        ("tokens per CPU second", [each.per_cpu_second for each in rounds]),
    ):
        for way in (BESIDE, ADAPTERS):
            ratios = [each[way] / each[PLAIN] for each in figures]
            listed = ", ".join(f"{ratio:.3f}" for ratio in ratios)
            lines.append(f"{what}, {way} / {PLAIN}: median {statistics.median(ratios):.3f} ({listed})")
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=3, help="in a round; three give each way each place once")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--engine-flags", nargs=argparse.REMAINDER, default=[], help="last; for both")
    parser.add_argument("--out", type=Path, help="JSON file for machine and rounds")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        rounds = asyncio.run(run(options, Path(scratch)))
    print(summary(rounds))
    if options.out is not None:
        facts = machine_facts(["lora_cost", *arguments], Path(__file__).parents[2])
        options.out.write_text(json.dumps({"machine": facts, "rounds": [asdict(each) for each in rounds]}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])
