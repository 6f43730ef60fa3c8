"""Decode step time of the torch backend with one rank and with more, one thread each, in turns.

    python -m benchmarks.engine.tensor_parallel_steps --ranks 2 --batch 1 8 --rounds 3

Prints the median step in milliseconds for each batch. Without `--model` it is a random Llama in float32 of the default
model's shape, but with 8 and 4 heads: the default model's 9 and 3 cannot be shared by two ranks.
Must not know: the scheduler, the services.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from engine_service.core.plan import Chunk, NewRequest, Plan
from engine_service.core.sampling import SamplingParams
from engine_service.worker.build import build_worker
from engine_service.worker.config import ModelDtype, WorkerConfig
from engine_service.worker.rank_processes import RankProcesses, RankProgram
from engine_service.worker.worker import Worker

_PROMPT = 64
_STEPS = 20
_BLOCK = 16
_GREEDY = SamplingParams(max_tokens=_STEPS + 1, seed=0, temperature=0.0, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        _compare(options, options.model or _write_model(Path(name)))


def _compare(options: argparse.Namespace, folder: Path) -> None:
    sizes = (1, options.ranks)
    workers = {size: _worker(folder, size) for size in sizes}
    for batch in options.batch:
        seconds: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(options.rounds):
            for size, worker in workers.items():
                seconds[size] += _decode(worker, batch)
        print(f"batch {batch}: " + ", ".join(_shown(size, seconds[size]) for size in sizes), flush=True)
    for worker in workers.values():
        worker.close()


def _write_model(folder: Path) -> Path:
    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def _shown(size: int, seconds: list[float]) -> str:
    quartiles = statistics.quantiles(seconds, n=4)
    least, median, most = (1000 * value for value in quartiles)
    return f"ranks {size}: {median:.1f} ms (quartiles {least:.1f} to {most:.1f})"


def _worker(folder: Path, ranks: int) -> Worker:
    config = WorkerConfig(
        model_folder=folder,
        backend="torch",
        dtype=ModelDtype.FLOAT32,
        num_blocks=1024,
        block_size=_BLOCK,
        max_model_len=512,
        threads=ranks,
        tensor_parallel_size=ranks,
    )
    if ranks == 1:
        return build_worker(config)
    program = RankProgram("engine_service.rank_main", os.environ, ("warning", "console"))
    return build_worker(config, RankProcesses(config, program, on_lost=print))


def _decode(worker: Worker, batch: int) -> list[float]:
    """Seconds of each decode step of `batch` requests, after their prompts."""
    blocks = -(-(_PROMPT + _STEPS + 1) // _BLOCK)
    new = tuple(
        NewRequest(i, (i + 5,) * _PROMPT, _PROMPT, tuple(range(i * blocks, (i + 1) * blocks)), _GREEDY)
        for i in range(batch)
    )
    _run(worker, Plan(0, tuple(Chunk(i, 0, _PROMPT, (), True) for i in range(batch)), new))
    seconds = []
    for step in range(_STEPS):
        started = time.perf_counter()
        _run(worker, Plan(0, tuple(Chunk(i, _PROMPT + step, 1, (), True) for i in range(batch))))
        seconds.append(time.perf_counter() - started)
    _run(worker, Plan(0, (), (), tuple(range(batch))))
    return seconds


def _run(worker: Worker, plan: Plan) -> None:
    worker.submit(plan)
    worker.result()


if __name__ == "__main__":
    main()
