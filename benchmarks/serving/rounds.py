"""Rounds: every target serves the same new workload at each concurrency, one target at a time, the others stopped.

Must not know: how targets are started, how figures are shown.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.serving.machine import BusyMeter
from benchmarks.serving.measures import Measures, measure
from benchmarks.serving.targets import Target
from benchmarks.serving.workload import BenchRequest, Shape, WordList, make_workload

# At least that many requests per client: the tail, when clients are already idle, should not count for much.
DEFAULT_REQUESTS: Mapping[int, int] = {1: 8, 8: 32, 32: 96, 64: 192}
_WARM_UP_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Settings:
    """`requests[c]` are sent at concurrency c. `seed` gives every round its own prompts, so that no target
    meets a prompt twice (caches of prefixes)."""

    rounds: int
    concurrency: tuple[int, ...]
    requests: Mapping[int, int]
    shape: Shape
    seed: int

    def __post_init__(self) -> None:
        if self.rounds < 1 or not self.concurrency or min(self.concurrency) < 1:
            raise ValueError(f"{self.rounds} rounds at concurrency {self.concurrency}: all must be positive")
        for concurrency in self.concurrency:
            if self.num_requests(concurrency) < concurrency:
                raise ValueError(f"{self.num_requests(concurrency)} requests cannot fill {concurrency} clients")

    def num_requests(self, concurrency: int) -> int:
        return self.requests.get(concurrency, DEFAULT_REQUESTS.get(concurrency, 3 * concurrency))


@dataclass(frozen=True, slots=True)
class Turn:
    """One target at one concurrency in one round. `neighbours`: the part of all cores' time that was neither the
    target's nor ours: near 0 on a quiet machine. `memory_bytes` of the target's processes after it."""

    target: str
    round: int
    concurrency: int
    neighbours: float
    memory_bytes: int
    measures: Measures
    first_error: str | None


def counts_of(pairs: Sequence[str]) -> dict[int, int]:
    """ "8:32" and so on: 32 requests at concurrency 8. ValueError for anything else."""
    counts = {}
    for pair in pairs:
        level, colon, count = pair.partition(":")
        if not (colon and level.isdecimal() and count.isdecimal()):
            raise ValueError(f"{pair!r} is not CONCURRENCY:REQUESTS")
        counts[int(level)] = int(count)
    return counts


async def play(
    targets: Mapping[str, Target], settings: Settings, words: WordList, say: Callable[[str], None]
) -> list[Turn]:
    """All rounds. Targets must be paused; they are again at the end."""
    turns: list[Turn] = []
    for number in range(settings.rounds):
        order = _rotated(tuple(targets), number)
        for concurrency in settings.concurrency:
            requests = workload(settings, words, number, concurrency)
            for name in order:
                turn = await _turn(name, targets[name], number, concurrency, requests, settings, words)
                say(describe(turn))
                turns.append(turn)
    return turns


def workload(settings: Settings, words: WordList, number: int, concurrency: int) -> tuple[BenchRequest, ...]:
    """The requests of a round: the same for all targets, and met by none before."""
    seed = hash((settings.seed, number, concurrency))
    return make_workload(words, settings.shape, settings.num_requests(concurrency), seed)


def _rotated(names: tuple[str, ...], number: int) -> tuple[str, ...]:
    """A target that always came first would always follow the same neighbour."""
    start = number % len(names)
    return names[start:] + names[:start]


async def _turn(
    name: str,
    target: Target,
    number: int,
    concurrency: int,
    requests: Sequence[BenchRequest],
    settings: Settings,
    words: WordList,
) -> Turn:
    resume(target)
    try:
        await target.run(_warm_up(settings, words, number, concurrency), concurrency)
        meter, own_s = BusyMeter(), _own_cpu_s(target)
        records = await target.run(requests, concurrency)
        neighbours = meter.look(_own_cpu_s(target) - own_s)
        memory = sum(process.memory_bytes() for process in target.processes)
    finally:
        pause(target)
    errors = [record.error for record in records if record.error is not None]
    measures = measure(records, concurrency)
    return Turn(name, number, concurrency, neighbours, memory, measures, errors[0] if errors else None)


def _own_cpu_s(target: Target) -> float:
    """CPU seconds of the target and of this process so far."""
    return time.process_time() + sum(process.cpu_s() for process in target.processes)


def _warm_up(settings: Settings, words: WordList, number: int, concurrency: int) -> tuple[BenchRequest, ...]:
    """Uncounted: a target that was stopped finds its memory, threads and connections again."""
    shape = Shape(settings.shape.prompt_tokens, min(_WARM_UP_TOKENS, settings.shape.output_tokens))
    seed = hash((settings.seed, number, concurrency, _WARM_UP_TOKENS))
    return make_workload(words, shape, concurrency, seed)


def pause(target: Target) -> None:
    for process in target.processes:
        process.pause()


def resume(target: Target) -> None:
    for process in target.processes:
        process.resume()


def describe(turn: Turn) -> str:
    """One line."""
    measures = turn.measures
    error = f"  {measures.errors} ERRORS: {turn.first_error}" if measures.errors else ""
    return (
        f"round {turn.round + 1} c={turn.concurrency:<3} {turn.target:<18} {measures.tokens_per_s:8.1f} tok/s  "
        f"TTFT {measures.ttft_ms.p50:7.1f} ms  ITL {measures.itl_ms.p50:6.1f} ms (p99 {measures.itl_ms.p99:6.1f})  "
        f"neighbours {turn.neighbours:4.0%}{error}"
    )
