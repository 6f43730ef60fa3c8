"""CPU milliseconds of one thread to draw the tokens of a step of 16 rows: kernels and torch, 8 rows masked and none.

`python -m benchmarks.micro.draw [--steps N]`. Half of the masks leave 160 tokens, half all but 400, as those of a JSON
schema do between strings and inside them. CPU time, so that a busy machine does not matter much.
Must not know: models, grammars.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from engine_service.worker.kernels.build import Unavailable, default_folder, prepare_best_library
from engine_service.worker.kernels.library import KernelLibrary, ThreadTeam
from engine_service.worker.kernels.row_draw import KernelDraw
from engine_service.worker.sampler import Sampler
from engine_service.worker.sampling_rows import SamplingRows, TokenMasks

_ROWS, _MASKED, _VOCABULARY = 16, 8, 49_152
_SETTINGS = ((0, 1.0), (0, 0.9), (50, 1.0))  # top_k, top_p


def _masks() -> TokenMasks:
    draw = np.random.default_rng(1)
    allowed = np.zeros((_MASKED, _VOCABULARY), dtype=np.bool_)
    for number, row in enumerate(allowed):
        row[draw.permutation(_VOCABULARY)[: 160 if number % 2 else _VOCABULARY - 400]] = True
    bits = np.packbits(allowed, axis=1, bitorder="little").view(np.int32)
    return TokenMasks(np.arange(0, _ROWS, _ROWS // _MASKED), torch.from_numpy(bits))


def _rows(top_k: int, top_p: float, step: int, masks: TokenMasks | None) -> SamplingRows:
    return SamplingRows(
        temperature=np.ones(_ROWS, np.float32),
        top_k=np.full(_ROWS, top_k),
        top_p=np.full(_ROWS, top_p),
        min_p=np.zeros(_ROWS, np.float32),
        uniforms=np.random.default_rng(step).random(_ROWS),
        masks=masks,
    )


def _median_ms(sampler: Sampler, logits: torch.Tensor, steps: Sequence[SamplingRows]) -> float:
    best = logits.max(dim=-1).indices
    seconds = []
    for rows in steps:
        begin = time.thread_time()
        sampler.sample(logits, rows, best)
        seconds.append(time.thread_time() - begin)
    return statistics.median(seconds) * 1000


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    count = parser.parse_args(arguments).steps
    torch.set_num_threads(1)
    library = prepare_best_library(default_folder(), print)
    if isinstance(library, Unavailable):
        raise SystemExit(library.reason)
    cpu = torch.device("cpu")
    logits = torch.randn(_ROWS, _VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2.5
    with ThreadTeam(KernelLibrary(library), 1) as team, torch.inference_mode():
        samplers = {
            "torch": Sampler(_VOCABULARY, cpu),
            "kernels": Sampler(_VOCABULARY, cpu, KernelDraw(_VOCABULARY, team)),
        }
        for top_k, top_p in _SETTINGS:
            for name, sampler in samplers.items():
                plain, masked = (
                    _median_ms(sampler, logits, [_rows(top_k, top_p, step, masks) for step in range(count)])
                    for masks in (None, _masks())
                )
                print(f"top_k {top_k:2} top_p {top_p} {name:8} no masks {plain:6.2f} ms, 8 masked {masked:6.2f} ms")


if __name__ == "__main__":
    main(sys.argv[1:])
