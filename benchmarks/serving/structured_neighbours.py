"""What structured streams cost their unconstrained neighbours: tokens per second of 8 neighbours, interleaved rounds.

`python -m benchmarks.serving.structured_neighbours HOST:PORT [--rounds N]`, of a running engine service. Each round
measures the neighbours alone, beside 8 more unconstrained streams, and beside 8 structured ones; the last two
compare a mask with none at the same batch. Must not know: how the engine is started.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc

from service_runtime.grpc_server import channel_options
from tokenwire.common.v1 import sampling_pb2
from tokenwire.engine.v1 import engine_pb2, engine_pb2_grpc

STREAMS = 8
_PROMPT = list(range(1000, 1032))
_SCHEMA = json.dumps(
    {
        "type": "array",
        "minItems": 100_000,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 24},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "tags": {"type": "array", "items": {"enum": ["a", "b", "삼"]}, "maxItems": 3},
            },
            "required": ["name", "age", "tags"],
            "additionalProperties": False,
        },
    }
)
_BESIDE = ("alone", "unconstrained", "structured")


def _request(seed: int, max_tokens: int, is_structured: bool) -> engine_pb2.GenerateRequest:
    sampling = sampling_pb2.SamplingParams(max_tokens=max_tokens, seed=seed, temperature=1.0)
    if is_structured:
        sampling.structured_output.json_schema = _SCHEMA
    else:
        sampling.ignore_eos = True
    prompt = [*_PROMPT, 2000 + seed % 1000]
    return engine_pb2.GenerateRequest(request=engine_pb2.TokenRequest(prompt_token_ids=prompt, sampling=sampling))


async def _read(stub: Any, request: engine_pb2.GenerateRequest) -> int:
    count = 0
    async for response in stub.Generate(request):
        count += len(response.token_ids)
    return count


async def _for_ever(stub: Any, seeds: "itertools.count[int]", is_structured: bool) -> None:
    while True:
        await _read(stub, _request(next(seeds), 512, is_structured))


async def _measure(stub: Any, beside: str, max_tokens: int, seeds: "itertools.count[int]") -> float:
    """Tokens per second of the neighbours together."""
    extra = 0 if beside == "alone" else STREAMS
    others = [asyncio.create_task(_for_ever(stub, seeds, beside == "structured")) for _ in range(extra)]
    try:
        begin = time.perf_counter()
        counts = await asyncio.gather(*(_read(stub, _request(next(seeds), max_tokens, False)) for _ in range(STREAMS)))
        for task in others:
            if task.done():
                task.result()  # raises what it failed with
        return sum(counts) / (time.perf_counter() - begin)
    finally:
        for task in others:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def run(target: str, rounds: int, max_tokens: int) -> dict[str, list[float]]:
    """Tokens per second by what ran beside, one figure a round; the order turns with each round."""
    seeds = itertools.count(1)
    figures: dict[str, list[float]] = {beside: [] for beside in _BESIDE}
    async with grpc.aio.insecure_channel(target, options=channel_options()) as channel:
        stub = engine_pb2_grpc.EngineServiceStub(channel)
        await _read(stub, _request(0, 8, True))  # the grammar is compiled once
        for number in range(rounds):
            for place in range(len(_BESIDE)):
                beside = _BESIDE[(number + place) % len(_BESIDE)]
                figures[beside].append(await _measure(stub, beside, max_tokens, seeds))
    return figures


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args(arguments)
    figures = asyncio.run(run(options.target, options.rounds, options.max_tokens))
    for beside, values in figures.items():
        print(f"{beside:14} median {statistics.median(values):8.1f} tokens/s  {[round(value, 1) for value in values]}")
    ratios = [s / u for s, u in zip(figures["structured"], figures["unconstrained"], strict=True)]
    print(f"structured / unconstrained, by round: median {statistics.median(ratios):.3f}")


if __name__ == "__main__":
    main(sys.argv[1:])
