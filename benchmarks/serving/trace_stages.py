"""Do the stages of a trace add up to the latency that a client measures? `python -m benchmarks.serving.trace_stages`

Both services as processes, traced by a collector in this process; a client that takes the time of each request
itself. Must not know: how spans are recorded.
"""

import argparse
import asyncio
import os
import secrets
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.serving.processes import GroupProcess
from benchmarks.serving.services import start_services
from benchmarks.serving.trace_collector import Collector, Tree, collector
from service_runtime.model_files import DEFAULT_MODEL
from tokenwire_client import AsyncClient, Sampling

STAGES = ("validate", "encode", "route", "queue", "prefill", "decode", "deliver")
TRANSIT = "transit"
"""The way to the engine and back: what the engine's own stages leave of `generate`."""
MOST_UNEXPLAINED = 0.05
_START_S = 300.0
_PHRASE = "the quick brown fox jumps over the lazy dog and goes on to see what is behind the hill"
_WORDS = _PHRASE.split()


@dataclass(frozen=True, slots=True)
class Measured:
    """Seconds of one request: by the client's clock, and of each stage by its trace."""

    latency_s: float
    stages_s: dict[str, float]

    def explained(self, *without: str) -> float:
        """The stages' share of the latency."""
        return sum(seconds for name, seconds in self.stages_s.items() if name not in without) / self.latency_s


async def measure(client: AsyncClient, traces: Collector, number: int, tokens: int) -> Measured:
    trace_id = secrets.token_hex(16)
    # A prompt of its own, so that nothing is cached.
    prompt = f"{number} " + " ".join(_WORDS[(number + place) % len(_WORDS)] for place in range(100))
    began = time.perf_counter()
    await client.generate(
        prompt,
        Sampling(max_tokens=tokens, ignore_eos=True, seed=number),
        traceparent=f"00-{trace_id}-{secrets.token_hex(8)}-01",
    ).result()
    latency_s = time.perf_counter() - began
    tree = await asyncio.to_thread(traces.wait_trace, trace_id, "generate", *STAGES)
    return Measured(latency_s, _stages(tree))


def _stages(tree: Tree) -> dict[str, float]:
    stages = {name: tree.named(name).seconds for name in STAGES}
    engine_s = stages["queue"] + stages["prefill"] + stages["decode"]
    return stages | {TRANSIT: tree.named("generate").seconds - engine_s}


async def run(requests: int, concurrency: int, tokens: int, threads: int) -> list[Measured]:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        traces = stack.enter_context(collector())

        def started(process: GroupProcess) -> None:
            stack.push_async_callback(process.stop)

        traced = ("--otlp-endpoint", traces.endpoint)
        services = await start_services(
            Path(DEFAULT_MODEL),
            folder / "log",
            (*traced, "--threads", str(threads)),
            traced,
            os.environ,
            time.monotonic() + _START_S,
            started,
        )
        client = await stack.enter_async_context(AsyncClient(services.tokenizer))
        await measure(client, traces, 0, tokens)  # warm
        turns = asyncio.Semaphore(concurrency)

        async def one(number: int) -> Measured:
            async with turns:
                return await measure(client, traces, number, tokens)

        return await asyncio.gather(*(one(number) for number in range(1, requests + 1)))


def report(found: Sequence[Measured]) -> str:
    latency = statistics.mean(each.latency_s for each in found)
    lines = [
        f"{len(found)} requests, mean latency {latency * 1000:.1f} ms",
        f"{'stage':<10}{'mean ms':>10}{'share':>8}",
    ]
    for name in (*STAGES, TRANSIT):
        mean = statistics.mean(each.stages_s[name] for each in found)
        lines.append(f"{name:<10}{mean * 1000:>10.2f}{mean / latency:>8.1%}")
    lines.append(_shares("explained", [each.explained() for each in found]))
    lines.append(_shares("without transit", [each.explained(TRANSIT) for each in found]))
    return "\n".join(lines)


def _shares(name: str, found: Sequence[float]) -> str:
    return f"{name}: min {min(found):.1%}, median {statistics.median(found):.1%}, max {max(found):.1%}"


def main() -> int:
    """Exit code 1 when more than 5 % of any request's latency is in no stage."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20)
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    found = asyncio.run(run(options.requests, options.concurrency, options.tokens, options.threads))
    print(report(found))
    return int(any(abs(1 - each.explained()) > MOST_UNEXPLAINED for each in found))


if __name__ == "__main__":
    sys.exit(main())
