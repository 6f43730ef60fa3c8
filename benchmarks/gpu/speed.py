"""Times decode steps and prefills of a worker, each beside the least time that the device could take.

Must not know: equality, how a report is shown.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.ceilings import Ceilings
from benchmarks.gpu.requests import Requests
from benchmarks.gpu.stopwatch import Stopwatch
from engine_service.worker.worker import Worker

BuildWorker = Callable[[bool], Worker]
"""With or without graphs."""

_WARM_UP_STEPS = 3


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
    found: list[Timing] = []
    for graphs in (True, False):
        # A worker's memory is free again when the function it lives in has returned.
        found += _decodes_of(build(graphs), graphs, sizes, costs, ceilings, watch)
    return found


def time_packed(
    what: str, worker: Worker, sizes: Sizes, costs: ModelCosts, ceilings: Ceilings, watch: Stopwatch
) -> list[Timing]:
    """Decode steps by graphs of a worker whose weights are packed."""
    return _decodes_of(worker, True, sizes, costs, ceilings, watch, what)


def _decodes_of(
    worker: Worker,
    graphs: bool,
    sizes: Sizes,
    costs: ModelCosts,
    ceilings: Ceilings,
    watch: Stopwatch,
    what: str = "decode",
) -> list[Timing]:
    found = []
    for batch in sizes.batches:
        requests = Requests(worker, _prompts(batch, sizes.context, worker.info.vocab_size))
        requests.prefill(sizes.budget)
        moved = costs.weight_bytes + batch * (sizes.context + 2 * sizes.steps) * costs.kv_bytes
        for overlap in (False, True):
            requests.decode(_WARM_UP_STEPS, overlap=overlap)
            run = partial(requests.decode, sizes.steps, overlap=overlap)
            seconds = watch.seconds(run, repeats=1, warm_ups=0) / sizes.steps
            found.append(Timing(what, batch, graphs, overlap, seconds, moved / ceilings.bandwidth))
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
        run = partial(_prefill, worker, _prompts(1, length, worker.info.vocab_size))
        floor = 2 * costs.weights * length / ceilings.matrix_rate
        found.append(Timing("prefill", length, False, False, watch.seconds(run, repeats=3, warm_ups=1), floor))
    worker.close()
    return found


def _prefill(worker: Worker, prompts: list[list[int]]) -> None:
    requests = Requests(worker, prompts)
    requests.prefill(len(prompts[0]))
    requests.leave()


def _prompts(count: int, length: int, vocab_size: int) -> list[list[int]]:
    """Random tokens: timings on equal ones may be better than what is served."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, vocab_size, (count, length), generator=generator).tolist()
