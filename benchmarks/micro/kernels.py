"""Micro-benchmark of the C++ decoder: milliseconds per step by batch, by stage, beside the machine's limits.

`python -m benchmarks.micro.kernels [--model M] [--threads N ...]`. Neighbours disturb: minima are reported.
Must not know: the services.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from transformers import AutoConfig

from engine_service.worker.checkpoint import Checkpoint
from engine_service.worker.config import WeightFormat
from engine_service.worker.kernels.build import (
    Unavailable,
    Variant,
    default_folder,
    find_compiler,
    prepare_library,
    read_cpu_flags,
    runnable_variants,
)
from engine_service.worker.kernels.cpu_model import CpuModel, PoolSize, build_cpu_model
from engine_service.worker.kernels.decoder_shape import Unsupported
from engine_service.worker.kernels.library import DEFAULT_SPIN, KernelLibrary, ThreadTeam
from engine_service.worker.kernels.step_batch import StepBatch
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """`decodes` requests of `context` tokens that decode one each, beside a prefill chunk of `prefill` tokens."""

    decodes: int
    prefill: int = 0
    context: int = 128

    @property
    def name(self) -> str:
        long = f"@{self.context}" if self.context > 128 else ""
        return f"{self.prefill}+{self.decodes}{long}" if self.prefill else f"b{self.decodes}{long}"

    @property
    def blocks(self) -> int:
        return self.decodes * -(-self.context // BLOCK_SIZE) + -(-self.prefill // BLOCK_SIZE)


CASES = (Case(1), Case(8), Case(32), Case(64), Case(8, 128), Case(8, 512), Case(1, context=4000))


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds: the fastest and the median step, the least CPU time of the calling thread (with one thread
    the best measure beside busy neighbours), and each stage's own fastest."""

    case: str
    threads: int
    fastest: float
    median: float
    cpu: float
    stages: dict[str, float]

    @property
    def quiet(self) -> float:
        return sum(self.stages.values())


def make_batch(case: Case) -> StepBatch:
    """Random ids; every request has its own neighbouring blocks."""
    lengths = [case.context] * case.decodes + ([case.prefill] if case.prefill else [])
    chunks = [1] * case.decodes + ([case.prefill] if case.prefill else [])
    counts = [-(-length // BLOCK_SIZE) for length in lengths]
    firsts = [sum(counts[:i]) for i in range(len(counts))]
    tables = torch.zeros(len(lengths), max(counts), dtype=torch.int32)
    for row, (first, count) in enumerate(zip(firsts, counts, strict=True)):
        tables[row, :count] = torch.arange(first, first + count)
    positions = torch.cat([torch.arange(n - c, n) for n, c in zip(lengths, chunks, strict=True)])
    owners = torch.repeat_interleave(torch.arange(len(chunks)), torch.tensor(chunks))
    slots = tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    ids = torch.randint(0, 256, (len(positions),), generator=torch.Generator().manual_seed(0))
    ends = torch.tensor(chunks).cumsum(0)
    return StepBatch(
        input_ids=ids,
        positions=positions,
        slot_mapping=slots,
        block_tables=tables,
        query_start=torch.cat([torch.zeros(1, dtype=torch.int64), ends]).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32),
        sample_rows=ends - 1,
    )


def measure(model: CpuModel, case: Case, threads: int, seconds: float) -> Measured:
    """Steps of `case` for about `seconds`, at least 5."""
    batch = make_batch(case)
    model.step(batch)
    model.take_times(enabled=True)
    times: list[float] = []
    cpu: list[float] = []
    stages: dict[str, float] = {}
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start, cpu_start = time.perf_counter(), time.thread_time()
        model.step(batch)
        times.append((time.perf_counter() - start) * 1e3)
        cpu.append((time.thread_time() - cpu_start) * 1e3)
        taken = model.take_times(enabled=True)
        for name, value in taken.items():
            stages[name] = min(stages.get(name, value * 1e3), value * 1e3)
    model.take_times(enabled=False)
    return Measured(case.name, threads, min(times), sorted(times)[len(times) // 2], min(cpu), stages)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.kernels", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--spin", type=int, default=DEFAULT_SPIN)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--weights", choices=[f.value for f in WeightFormat], default=WeightFormat.PLAIN.value)
    parser.add_argument("--variant", choices=[v.value for v in Variant], default=None)
    parser.add_argument("--seconds", type=float, default=2.0, help="per case")
    parser.add_argument("--cases", nargs="+", default=None, help="names such as b1 or 512+8")
    parser.add_argument("--json", default=None, help="file for the figures")
    options = parser.parse_args(arguments)
    variant = Variant(options.variant) if options.variant else runnable_variants(read_cpu_flags())[0]
    made = prepare_library(variant, default_folder(), find_compiler(), lambda line: print(line, file=sys.stderr))
    if isinstance(made, Unavailable):
        print(made.reason, file=sys.stderr)
        return 1
    cases = [case for case in CASES if options.cases is None or case.name in options.cases]
    results: list[Measured] = []
    for threads in options.threads:
        with ThreadTeam(KernelLibrary(made), threads, options.spin) as team:
            model = build(options.model, getattr(torch, options.dtype), WeightFormat(options.weights), cases, team)
            print(f"{team.library.variant}, {threads} threads, weights {model.weight_bytes / 1e6:.0f} MB")
            results += [measure(model, case, threads, options.seconds) for case in cases]
            model.close()
    show(results)
    if options.json:
        with open(options.json, "w") as file:
            json.dump([asdict(result) for result in results], file, indent=1)
    return 0


def build(
    reference: str, dtype: torch.dtype, weight_format: WeightFormat, cases: Sequence[Case], team: ThreadTeam
) -> CpuModel:
    """The model, with a pool that holds the largest case."""
    folder = resolve_model_folder(reference)
    pool = PoolSize(max(case.blocks for case in cases), BLOCK_SIZE)
    config = AutoConfig.from_pretrained(folder)
    model = build_cpu_model(Checkpoint(folder), config, pool, dtype, 8192, team, weight_format)
    if isinstance(model, Unsupported):
        raise SystemExit(model.reason)
    return model


def show(results: Sequence[Measured]) -> None:
    """One line a case."""
    for result in results:
        stages = " ".join(f"{name} {value:.1f}" for name, value in result.stages.items())
        head = f"t{result.threads} {result.case:>7}: {result.fastest:6.1f} ms (median {result.median:6.1f}, cpu"
        print(f"{head} {result.cpu:6.1f}, stages {result.quiet:6.1f})  {stages}")


if __name__ == "__main__":
    raise SystemExit(main())
