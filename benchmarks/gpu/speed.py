"""Times decode steps and prefills of a worker, each beside the least time that the device could take.

Must not know: equality, how a report is shown.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.requests import Requests
from benchmarks.gpu.stopwatch import Stopwatch
from engine_service.worker.worker import Worker

BuildWorker = Callable[[bool], Worker]
"""With or without graphs."""


@dataclass(frozen=True, slots=True)
class ModelCosts:
    """What a step must read and compute: bytes of weights, weights that multiply, KV bytes of a token."""

    weight_bytes: int
    weights: int
    kv_bytes: int


@dataclass(frozen=True, slots=True)
class Timing:
    """One measured step. `floor`: seconds that the device's measured limits allow."""

    what: str
    tokens: int
    graphs: bool
    overlap: bool
    seconds: float
    floor: float

    @property
    def of_floor(self) -> float:
        return self.floor / self.seconds


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured."""

    batches: Sequence[int]
    context: int
    prefills: Sequence[int]
    steps: int
    budget: int


def time_decodes(
    build: BuildWorker, sizes: Sizes, costs: ModelCosts, ceilings: Ceilings, watch: Stopwatch
) -> list[Timing]:
    """A decode step of each batch size, with and without graphs, each plain and overlapped."""
    found = []
    for graphs in (True, False):
        worker = build(graphs)
        for batch in sizes.batches:
            requests = Requests(worker, _prompts(batch, sizes.context, worker.info.vocab_size))
            requests.prefill(sizes.budget)
            for overlap in (False, True):
                requests.decode(3, overlap=overlap)
                seconds = watch.seconds(
                    lambda: requests.decode(sizes.steps, overlap=overlap),  # noqa: B023 (called before the next turn)
                    repeats=1,
                    warm_ups=0,
                )
                moved = costs.weight_bytes + batch * (sizes.context + 2 * sizes.steps) * costs.kv_bytes
                floor = moved / ceilings.bandwidth
                found.append(Timing("decode", batch, graphs, overlap, seconds / sizes.steps, floor))
            requests.leave()
        worker.close()
    return found


def time_prefills(
    build: BuildWorker, sizes: Sizes, costs: ModelCosts, ceilings: Ceilings, watch: Stopwatch
) -> list[Timing]:
    """One prompt in one step."""
    worker = build(False)
    found = []
    for length in sizes.prefills:

        def prefill(length: int = length) -> None:
            requests = Requests(worker, _prompts(1, length, worker.info.vocab_size))
            requests.prefill(length)
            requests.leave()

        seconds = watch.seconds(prefill, repeats=3, warm_ups=1)
        floor = 2 * costs.weights * length / ceilings.matrix_rate
        found.append(Timing("prefill", length, False, False, seconds, floor))
    worker.close()
    return found


def _prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random tokens: timings on equal ones may be better than what is served."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, vocab_size, (count, length), generator=generator).tolist()
