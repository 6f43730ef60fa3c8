"""The worker's own rules: what it reports, order of results, bounds, failures of single requests."""

import shutil
from dataclasses import asdict
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine_service.core.plan import Chunk, Failure, NewRequest, Plan, Result
from engine_service.core.sampling import SamplingParams
from engine_service.worker.build import build_worker
from engine_service.worker.config import WorkerConfig
from engine_service.worker.worker import Worker
from tests.fixtures.checkpoints import write_hist

GREEDY = SamplingParams(max_tokens=8, seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"), tokenizer=False)


def build(folder: Path, **settings: object) -> Worker:
    return build_worker(WorkerConfig(model_folder=folder, threads=1, **settings))  # type: ignore[arg-type]


def first_plan(*ids: int, samples: bool = True) -> Plan:
    new = tuple(NewRequest(one, (5, 6, one), 3, (one,), GREEDY) for one in ids)
    return Plan(0, tuple(Chunk(one, 0, 3 if samples else 2, (), samples) for one in ids), new)


@pytest.mark.parametrize(("backend", "budget", "head"), [("torch", 100_000, 16), ("cpu", 200_000, 32)])
def test_info_of_a_memory_budget(folder: Path, backend: str, budget: int, head: int) -> None:
    """B145: the limit is lowered to what the pool holds, and reported. The kernels pad heads to 32 numbers."""
    info = build(folder, kv_cache_memory=budget, backend=backend).info
    assert asdict(info) == {
        "vocab_size": 512,
        "max_model_len": 12 * 16,
        "eos_token_ids": (0,),
        "architecture": "LlamaForCausalLM",
        "dtype": "float32",
        "backend": backend,
        "block_size": 16,
        "num_blocks": 12,
        "kv_bytes_per_block": 2 * 16 * 2 * (head + head) * 4,
        "prefill_per_decode": 4,
        "rows_are_independent": backend == "cpu",
        "weights": {"source": "plain", "kept": "float32", "error": None} if backend == "cpu" else None,
    }


def test_smallpool_keeps_a_limit_longer_than_the_pool(folder: Path) -> None:
    info = build(folder, num_blocks=64, max_model_len=4096).info
    assert (info.num_blocks, info.block_size, info.max_model_len) == (64, 16, 4096)


def test_results_come_in_the_order_of_the_plans(folder: Path) -> None:
    worker = build(folder, num_blocks=8)
    worker.submit(first_plan(1, 2))
    worker.submit(Plan(1, (Chunk(2, 3, 1, (), True),), (), (1,)))
    first, second = worker.result(), worker.result()
    assert (first.step, [request for request, _ in first.sampled]) == (0, [1, 2])
    assert (second.step, [request for request, _ in second.sampled]) == (1, [2])


def test_a_third_plan_in_flight_is_refused(folder: Path) -> None:
    worker = build(folder, num_blocks=8)
    worker.submit(first_plan(1))
    worker.submit(Plan(1, (Chunk(1, 3, 1, (), True),)))
    with pytest.raises(RuntimeError, match="2 plans are in flight"):
        worker.submit(Plan(2, ()))


def test_chunks_that_do_not_sample_give_nothing(folder: Path) -> None:
    """B068."""
    worker = build(folder, num_blocks=8)
    worker.submit(first_plan(1, 2, samples=False))
    assert worker.result() == Result(0, ())
    worker.submit(Plan(1, (Chunk(1, 2, 1, (), True), Chunk(2, 2, 1, (), True))))
    together = worker.result().sampled
    other = build(folder, num_blocks=8)
    other.submit(first_plan(1, 2))
    assert together == other.result().sampled


def test_a_request_back_in_the_plan_that_drops_it(folder: Path) -> None:
    """Preempted and resumed at once: `dropped` is done before `new`."""
    worker = build(folder, num_blocks=8)
    worker.submit(first_plan(1))
    ((_, token),) = worker.result().sampled
    worker.submit(Plan(1, (Chunk(1, 3, 1, (), True),)))
    expected = worker.result().sampled
    again = NewRequest(1, (5, 6, 1, token), 3, (4,), GREEDY)
    worker.submit(Plan(2, (Chunk(1, 0, 4, (), True),), (again,), (1,)))
    assert worker.result().sampled == expected


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_unsound_logits_end_one_request_only(folder: Path, tmp_path: Path, backend: str) -> None:
    """B150: NaN in the embedding of one token; its neighbour's answer is as without it."""
    clean = build(folder, num_blocks=8, backend=backend)
    clean.submit(first_plan(2))
    expected = clean.result().sampled
    shutil.copytree(folder, tmp_path / "broken")
    weights = load_file(tmp_path / "broken" / "model.safetensors")
    weights["model.embed_tokens.weight"][1] = float("nan")
    save_file(weights, tmp_path / "broken" / "model.safetensors", metadata={"format": "pt"})
    worker = build(tmp_path / "broken", num_blocks=8, backend=backend)
    worker.submit(first_plan(1, 2))
    result = worker.result()
    assert result.failures == (Failure(1, "the model's logits were not finite"),)
    assert result.sampled == expected


def test_as_many_requests_as_configured_and_rows_are_reused(folder: Path) -> None:
    worker = build(folder, num_blocks=8, max_num_requests=3)
    for _ in range(5):
        worker.submit(first_plan(1, 2, 3))
        assert len(worker.result().sampled) == 3
        worker.submit(Plan(1, (), (), (1, 2, 3)))
        worker.result()
