"""Checks and times the CUDA backend on a device in one command: `python -m benchmarks.gpu_check`.

Exit status 1 when anything is unequal or a test fails. `--device cpu --tiny` rehearses all of it without a device.
Imports only what the device's machine has (see docs/gpu.md).
"""

import argparse
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks.gpu import ceilings, equality, models, speed
from benchmarks.gpu.device_tests import DeviceTests, run_device_tests
from benchmarks.gpu.equality import Equality
from benchmarks.gpu.report import Report
from benchmarks.gpu.speed import ModelCosts, Sizes
from benchmarks.gpu.stopwatch import Stopwatch
from engine_service.worker.backend import LoadedModel
from engine_service.worker.build import assemble_worker
from engine_service.worker.config import CudaOptions, Device, WeightFormat, WorkerConfig
from engine_service.worker.cuda.backend import CudaModel, serve
from engine_service.worker.ranks import NoOtherRanks, RankPool
from engine_service.worker.worker import Worker

_SIZES = Sizes(batches=(1, 8, 64, 256), context=512, prefills=(512, 1024, 2048, 4096, 8192), steps=20, budget=8192)
_TINY = Sizes(batches=(1, 3), context=20, prefills=(32, 64), steps=2, budget=64)
_TEST_SECONDS = 150.0
_EQUALITY_LENGTH = 1024
_MOST_PACKED = 64  # requests at once that packed weights are timed with


@dataclass(frozen=True, slots=True)
class Setup:
    """Where and what."""

    device: torch.device
    tiny: bool
    sizes: Sizes
    watch: Stopwatch

    def config(self, graphs: bool, max_model_len: int, requests: int) -> WorkerConfig:
        """Of a worker whose model needs no folder."""
        return WorkerConfig(
            model_folder=Path(),
            device=Device(self.device.type),
            backend="cuda",
            max_model_len=max_model_len,
            max_num_requests=requests,
            step_token_budget=self.sizes.budget,
            kv_cache_fraction=0.8,
            kv_cache_memory=None if self.device.type == "cuda" else 32 * 1024**2,
            cuda=CudaOptions(graph_requests=512 if graphs else 0),
        )


def main(arguments: list[str] | None = None) -> int:
    options = _parse(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    begin = time.monotonic()
    device = torch.device(options.device)
    setup = Setup(device, options.tiny, _TINY if options.tiny else _SIZES, Stopwatch(device))
    report = _check(setup, options.model, run_tests=not options.no_tests, compiled=options.compile)
    print("\n".join(report.lines()))
    print(f"{'HOLDS' if report.holds else 'DOES NOT HOLD'} after {time.monotonic() - begin:.0f} s")
    report.write(options.out)
    return 0 if report.holds else 1


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few sizes")
    parser.add_argument("--model", type=Path, help="folder of a model to compare with transformers too")
    parser.add_argument("--compile", action="store_true", help="as --cuda-compile of the engine")
    parser.add_argument("--no-tests", action="store_true", help="leave the tests marked gpu out")
    default = Path(os.environ.get("OUT", ".run")) / "gpu_check.json"
    parser.add_argument("--out", type=Path, default=default, help="file for the figures (default: $OUT/gpu_check.json)")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this torch finds no CUDA device; --device cpu --tiny rehearses the check")
    return options


def _check(setup: Setup, folder: Path | None, *, run_tests: bool, compiled: bool) -> Report:
    dtype = torch.bfloat16
    limits = ceilings.measure(setup.device, dtype, setup.watch)
    # First, and in a process of its own: the device's memory is still free.
    tests = run_device_tests(_TEST_SECONDS) if run_tests and setup.device.type == "cuda" else None
    equalities: list[Equality] = []
    if folder is not None:
        equalities += _equalities(setup, models.of_folder(folder, setup.device, compiled=compiled))
    model = models.random_llama(setup.device, dtype, tiny=setup.tiny, compiled=compiled)
    equalities += _equalities(setup, model)
    timings = _timings(setup, model, limits)
    loaded = _serve(setup, model, setup.config(True, setup.sizes.budget, 1))
    # Last, as each overwrites the model's weights; from more bits to fewer.
    for weight_format in (WeightFormat.INT8, WeightFormat.INT4):
        packed = models.packed(model, weight_format, setup.device, compiled=compiled)
        equalities += _equalities(setup, packed, both=False)
        timings += _packed_timings(setup, packed, weight_format.value, limits)
    return Report(
        device=torch.cuda.get_device_name() if setup.device.type == "cuda" else "cpu",
        torch=torch.__version__,
        attention=_attention(loaded),
        passed_over=_passed_over(loaded),
        ceilings=limits,
        equalities=equalities,
        tests=_without_output(tests),
        timings=timings,
    )


def _without_output(tests: DeviceTests | None) -> DeviceTests | None:
    """What passed need not be read."""
    return tests if tests is None or not tests.passed else replace(tests, output=tests.output.splitlines()[-1])


def _equalities(setup: Setup, model: models.CheckedModel, *, both: bool = True) -> Iterator[Equality]:
    """With graphs, and without if `both`."""
    for graphs in (True, False) if both else (True,):
        length = min(_EQUALITY_LENGTH, model.facts.max_model_len)
        config = setup.config(graphs, length, requests=8)
        loaded = _serve(setup, model, config)
        size = loaded.default_block_size
        pool = RankPool(size, 16 * -(-length // size), length)
        kind = f"{_attention(loaded)}, {'graphs' if graphs else 'no graphs'}"
        yield equality.check_equality(model, loaded, config, pool, kind)
        setup.watch.wait()


def _timings(setup: Setup, model: models.CheckedModel, limits: ceilings.Ceilings) -> list[speed.Timing]:
    sizes = setup.sizes
    length = max(sizes.context + 4 * sizes.steps + 16, *sizes.prefills) + 1
    length = min(length, model.facts.max_model_len)

    def build(graphs: bool) -> Worker:
        config = setup.config(graphs, length, max(sizes.batches))
        return assemble_worker(config, _serve(setup, model, config), NoOtherRanks())

    costs = _costs(model)
    timings = speed.time_decodes(build, sizes, costs, limits, setup.watch)
    fitting = replace(sizes, prefills=[size for size in sizes.prefills if size <= length])
    return timings + speed.time_prefills(build, fitting, costs, limits, setup.watch)


def _packed_timings(
    setup: Setup, model: models.CheckedModel, what: str, limits: ceilings.Ceilings
) -> list[speed.Timing]:
    sizes = replace(setup.sizes, batches=[batch for batch in setup.sizes.batches if batch <= _MOST_PACKED])
    length = min(sizes.context + 4 * sizes.steps + 17, model.facts.max_model_len)
    config = setup.config(True, length, max(sizes.batches))
    worker = assemble_worker(config, _serve(setup, model, config), NoOtherRanks())
    return speed.time_packed(what, worker, sizes, _costs(model), limits, setup.watch)


def _costs(model: models.CheckedModel) -> ModelCosts:
    kv_numbers = sum(layer.num_kv_heads * (layer.key_dim + layer.value_dim) for layer in model.model.layers)
    return ModelCosts(model.weight_bytes, model.num_weights, kv_numbers * model.facts.dtype.itemsize)


def _serve(setup: Setup, model: models.CheckedModel, config: WorkerConfig) -> LoadedModel:
    return serve(model.model, model.facts, config, setup.device)


def _attention(loaded: LoadedModel) -> str:
    return loaded.choice.kernel.name if isinstance(loaded, CudaModel) else f"plain torch ({loaded.name})"


def _passed_over(loaded: LoadedModel) -> list[str]:
    found = loaded.choice.passed_over if isinstance(loaded, CudaModel) else ()
    return [f"{passed.kernel}: {passed.reason}" for passed in found]


if __name__ == "__main__":
    sys.exit(main())
