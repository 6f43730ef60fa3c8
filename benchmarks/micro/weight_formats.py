"""Micro-benchmark of the weight formats of the C++ decoder: milliseconds of a step's matrix products by its rows.

`python -m benchmarks.micro.weight_formats [--model M] [--threads N] [--rounds R]`. The formats take turns;
medians and minima are reported. Must not know: the services.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from statistics import median

import torch

from benchmarks.micro.kernels import Case, build, make_batch
from engine_service.worker.config import WeightFormat
from engine_service.worker.kernels.build import Unavailable, default_folder, prepare_best_library
from engine_service.worker.kernels.cpu_model import CpuModel
from engine_service.worker.kernels.library import KernelLibrary, ThreadTeam
from service_runtime.model_files import DEFAULT_MODEL

PRODUCTS = ("qkv", "output", "gate_up", "down", "head")
ROWS = (1, 2, 4, 8, 16, 32)
Times = dict[str, list[float]]


def measure(models: Mapping[WeightFormat, CpuModel], rows: int, rounds: int) -> dict[WeightFormat, Times]:
    """Milliseconds of each round: "products", those of the layers and of the head, and "step"."""
    batch = make_batch(Case(rows))
    found: dict[WeightFormat, Times] = {kept: {"layers": [], "head": [], "products": [], "step": []} for kept in models}
    for _ in range(rounds):
        for kept, model in models.items():
            model.take_times(enabled=True)
            model.step(batch)
            taken = {name: seconds * 1e3 for name, seconds in model.take_times(enabled=False).items()}
            products = sum(taken[name] for name in PRODUCTS)
            sums = {"head": taken["head"], "layers": products - taken["head"], "products": products}
            for name, value in {**sums, "step": sum(taken.values())}.items():
                found[kept][name].append(value)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.micro.weight_formats", description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    options = parser.parse_args(arguments)
    made = prepare_best_library(default_folder(), lambda line: print(line, file=sys.stderr))
    if isinstance(made, Unavailable):
        print(made.reason, file=sys.stderr)
        return 1
    with ThreadTeam(KernelLibrary(made), options.threads) as team:
        cases = [Case(rows) for rows in options.rows]
        models = {kept: build(options.model, torch.bfloat16, kept, cases, team) for kept in WeightFormat}
        sizes = ", ".join(f"{kept.value} {model.weight_bytes / 1e6:.0f} MB" for kept, model in models.items())
        print(f"{team.library.variant}, {options.threads} threads; weights: {sizes}")
        for rows in options.rows:
            show(rows, measure(models, rows, options.rounds))
        for model in models.values():
            model.close()
    return 0


def show(rows: int, found: Mapping[WeightFormat, Times]) -> None:
    """One line a format: medians (minima), and the median to that of plain weights."""
    plain = found[WeightFormat.PLAIN]
    for kept, times in found.items():
        parts = " ".join(f"{name} {median(value):6.2f} ({min(value):6.2f})" for name, value in times.items())
        gain = " ".join(f"{median(plain[name]) / median(times[name]):.2f}" for name in ("products", "step"))
        print(f"{rows:3d} rows {kept.value:>5}: {parts}  plain / this: {gain}")


if __name__ == "__main__":
    raise SystemExit(main())
