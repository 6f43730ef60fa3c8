"""What routing by cached prefix is worth: two engines, prompts that share prefixes, against round robin, interleaved.

`python -m benchmarks.serving.shared_prefix [--rounds N]`. Both engines are started once, with one thread each, and two
tokenizer services over the same two engines, one for each way of routing; they take turns (A B, B A, ...). Every turn
has prefixes of its own, so that nothing of an earlier turn helps. A turn asks for each prefix several times, in random
order, in a closed loop. The prefixes of a turn together do not fit into one engine's KV cache, but into both.
Must not know: how a request is routed.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import grpc

from benchmarks.serving.machine import BusyMeter, machine_facts
from benchmarks.serving.processes import GroupProcess
from benchmarks.serving.services import start_engine, start_tokenizer
from service_runtime.grpc_server import channel_options
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tokenwire.common.v1 import sampling_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire.tokenizer.v1 import tokenizer_pb2_grpc

WAYS = ("prefix", "round-robin")
_START_S = 120.0
_IDS = range(1000, 40_000)
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Load:
    """Lengths in tokens. `in_flight` requests are open at any time."""

    prefixes: int = 20
    requests_each: int = 5
    prefix_tokens: int = 384
    suffix_tokens: int = 32
    new_tokens: int = 8
    in_flight: int = 4
    engine_blocks: int = 320

    def prompts(self, seed: int) -> list[list[int]]:
        dice = random.Random(seed)
        heads = [dice.choices(_IDS, k=self.prefix_tokens) for _ in range(self.prefixes)]
        prompts = [[*head, *dice.choices(_IDS, k=self.suffix_tokens)] for head in heads * self.requests_each]
        dice.shuffle(prompts)
        return prompts


@dataclass(frozen=True, slots=True)
class Turn:
    """Of one way of routing in one round. `busy`: part of all cores that other processes used."""

    way: str
    cached_tokens: int
    prompt_tokens: int
    ttft_p50_ms: float
    ttft_p95_ms: float
    seconds: float
    busy: float


async def _one(
    stub: "tokenizer_pb2_grpc.TokenizerServiceAsyncStub", prompt: list[int], load: Load
) -> tuple[float, int]:
    """Seconds to the first token, and cached tokens."""
    sampling = sampling_pb2.SamplingParams(max_tokens=load.new_tokens, temperature=0.0, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), options=pb.GenerationOptions(sampling=sampling))
    begin = time.perf_counter()
    first: float | None = None
    cached = 0
    async for message in stub.Generate(request):
        if first is None and message.token_ids:
            first = time.perf_counter() - begin
        if message.HasField("completion"):
            cached = message.completion.usage.cached_tokens
    if first is None:
        raise RuntimeError("a stream without a token")
    return first, cached


async def _turn(way: str, target: str, load: Load, seed: int, engines: Sequence[GroupProcess]) -> Turn:
    prompts = load.prompts(seed)
    waiting = iter(prompts)
    results: list[tuple[float, int]] = []
    own_before, meter, begin = sum(each.cpu_s() for each in engines), BusyMeter(), time.perf_counter()
    async with grpc.aio.insecure_channel(target, options=channel_options()) as channel:
        stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)

        async def client() -> None:
            for prompt in waiting:
                results.append(await _one(stub, prompt, load))

        await asyncio.gather(*(client() for _ in range(load.in_flight)))
    seconds = time.perf_counter() - begin
    firsts = sorted(first for first, _ in results)
    return Turn(
        way,
        sum(cached for _, cached in results),
        sum(map(len, prompts)),
        round(statistics.median(firsts) * 1e3, 1),
        round(firsts[int(len(firsts) * 0.95)] * 1e3, 1),
        round(seconds, 2),
        round(meter.look(sum(each.cpu_s() for each in engines) - own_before), 2),
    )


async def run(load: Load, rounds: int, logs: Path) -> list[Turn]:
    """The turns, in the order in which they were measured; printed as they end."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    model = resolve_model_folder(DEFAULT_MODEL)
    deadline = time.monotonic() + _START_S
    processes: list[GroupProcess] = []
    turns: list[Turn] = []
    async with AsyncExitStack() as stack:

        def started(process: GroupProcess) -> None:
            processes.append(process)
            stack.push_async_callback(process.stop)

        flags = [
            *("--threads", "1", "--block-size", str(_BLOCK_SIZE), "--num-blocks", str(load.engine_blocks)),
            *("--max-model-len", "1024", "--max-num-requests", "8"),
        ]
        engines = [
            await start_engine(model, logs / f"engine-{number}", flags, environment, deadline, started)
            for number in range(2)
        ]
        named = [part for engine in engines for part in ("--engine", engine.address)]
        targets = {}
        for way in WAYS:
            routed = (*named, "--routing", way)
            targets[way], _ = await start_tokenizer(model, logs / way, routed, environment, deadline, started)
        own = [engine.process for engine in engines]
        warm_up = Load(prefixes=2, requests_each=2)
        for way in WAYS:
            await _turn(way, targets[way], warm_up, seed=1, engines=own)
        for number in range(rounds):
            for way in WAYS if number % 2 == 0 else reversed(WAYS):
                turns.append(await _turn(way, targets[way], load, 1000 + len(turns), own))
                print(_line(turns[-1]), flush=True)
    return turns


def _line(turn: Turn) -> str:
    share = turn.cached_tokens / turn.prompt_tokens
    return (
        f"{turn.way:12} cached {turn.cached_tokens:7,} of {turn.prompt_tokens:,} ({share:.2f})  TTFT p50 "
        f"{turn.ttft_p50_ms:7.1f} ms  p95 {turn.ttft_p95_ms:7.1f} ms  {turn.seconds:6.2f} s  neighbours {turn.busy:.2f}"
    )


def summary(turns: Sequence[Turn]) -> str:
    """The ratios, round by round and in the median."""
    by_way = {way: [turn for turn in turns if turn.way == way] for way in WAYS}
    pairs = list(zip(by_way["prefix"], by_way["round-robin"], strict=True))
    cached = [ours.cached_tokens / max(1, theirs.cached_tokens) for ours, theirs in pairs]
    first = [ours.ttft_p50_ms / theirs.ttft_p50_ms for ours, theirs in pairs]
    whole = sum(t.cached_tokens for t in by_way["prefix"]) / max(1, sum(t.cached_tokens for t in by_way["round-robin"]))
    return "\n".join(
        (
            f"cached tokens, prefix to round-robin: {whole:.2f} (by round: {_listed(cached)})",
            f"TTFT p50, prefix to round-robin: median {statistics.median(first):.2f} (by round: {_listed(first)})",
        )
    )


def _listed(ratios: Sequence[float]) -> str:
    return ", ".join(f"{each:.2f}" for each in ratios)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    for name, default in asdict(Load()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="JSON file for machine, load and turns")
    options = vars(parser.parse_args(arguments))
    rounds, out = options.pop("rounds"), options.pop("out")
    load = Load(**options)
    with tempfile.TemporaryDirectory() as logs:
        turns = asyncio.run(run(load, rounds, Path(logs)))
    print(summary(turns))
    if out is not None:
        facts = machine_facts(["shared_prefix", *arguments], Path(__file__).parents[2])
        out.write_text(
            json.dumps({"machine": facts, "load": asdict(load), "turns": [asdict(t) for t in turns]}, indent=1)
        )


if __name__ == "__main__":
    main(sys.argv[1:])
