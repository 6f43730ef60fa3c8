"""What only a CUDA device can tell. Run by benchmarks/gpu_check.py; imports nothing that its machine may lack."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from engine_service.core.sampling import SamplingParams
from engine_service.worker.attention import KvGeometry, LayerShape
from engine_service.worker.build import build_worker
from engine_service.worker.config import CudaOptions, Device, ModelDtype, WeightFormat, WorkerConfig
from engine_service.worker.cuda import packed_choice
from engine_service.worker.cuda.choice import candidates
from engine_service.worker.cuda.graph_capture import CudaGraphRecorder
from engine_service.worker.cuda.packed_choice import choose_products
from engine_service.worker.cuda.packed_linear import PackedLinear, Scratch
from engine_service.worker.cuda.packed_matrix import pack_matrix, quantise
from engine_service.worker.cuda.pages import Pages
from engine_service.worker.cuda.pinned import PinnedTransfer
from engine_service.worker.cuda.self_test import find_fault
from engine_service.worker.logits import find_peaks
from engine_service.worker.sampled import Sampled
from engine_service.worker.worker import Worker
from tests.fixtures.checkpoints import HIST_VOCAB, greedy_of, load_reference, write_hist
from tests.fixtures.plan_driver import Job, PlanDriver, at_most

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
LLAMA = LayerShape(32, 8, 128, 128, 128**-0.5)
SHAPES = [LLAMA, LayerShape(9, 3, 64, 64, 0.125), LayerShape(8, 8, 128, 128, 0.09), replace(LLAMA, sliding_window=100)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"), tokenizer=False)


def worker_of(
    folder: Path,
    dtype: ModelDtype = ModelDtype.BFLOAT16,
    weight_format: WeightFormat = WeightFormat.PLAIN,
    **cuda: object,
) -> Worker:
    return build_worker(
        WorkerConfig(
            model_folder=folder,
            device=Device.CUDA,
            dtype=dtype,
            weight_format=weight_format,
            backend="cuda",
            num_blocks=200,
            max_model_len=2048,
            max_num_requests=16,
            cuda=CudaOptions(**cuda),  # type: ignore[arg-type]
        )
    )


def jobs_of(temperature: float = 0.0) -> list[Job]:
    draw = random.Random(3)
    lengths = (1, 2, 16, 17, 255, 256, 300, 5, 40, 90, 130)
    prompts = [draw.choices(range(HIST_VOCAB), k=length) for length in lengths]
    params = [SamplingParams(max_tokens=30, seed=seed, temperature=temperature) for seed in range(len(lengths))]
    return [Job(prompt, chosen) for prompt, chosen in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=["llama", "smollm", "all heads", "window"])
def test_some_kernel_attends_as_the_reference(shape: LayerShape, dtype: torch.dtype) -> None:
    """Every candidate's verdict is in the output when none is sound."""
    verdicts: dict[str, str | None] = {}
    for kernel in candidates(CUDA, batch_invariant=False):
        size = kernel.default_block_size
        page_size = kernel.pages.page_size(size)
        assert page_size is not None
        geometry = KvGeometry((shape,), size, dtype, CUDA)
        verdicts[kernel.name] = kernel.refusal((shape,), dtype) or find_fault(kernel, geometry, Pages(size, page_size))
    assert None in verdicts.values(), verdicts


def test_float32_is_transformers_exactly(folder: Path) -> None:
    worker = worker_of(folder, ModelDtype.FLOAT32)
    reference = load_reference(folder)
    jobs = jobs_of()[:6]
    assert PlanDriver(worker).run(jobs, at_most(64)) == [greedy_of(reference, job.prompt, 30) for job in jobs]
    worker.close()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reading_late_changes_nothing(folder: Path, temperature: float) -> None:
    """Two steps in flight: tokens stay on the device, staging memory is used again."""
    worker = worker_of(folder)
    plain = PlanDriver(worker).run(jobs_of(temperature), at_most(64))
    assert PlanDriver(worker, 1).run(jobs_of(temperature), at_most(64), in_flight=2) == plain
    worker.close()


def test_batch_invariant_decodes_are_those_of_one_alone(folder: Path) -> None:
    """Prompts whole in one step, so that only the decodes' company differs."""
    try:
        worker = worker_of(folder, batch_invariant=True)
    except ValueError as refusal:
        assert "batch_invariant" in str(refusal)  # noqa: PT017 (this torch cannot promise it, and says so)
        return
    alone = [PlanDriver(worker, seed).run([job])[0] for seed, job in enumerate(jobs_of())]
    jobs = jobs_of()
    for place, job in enumerate(jobs):
        job.arrives = place
    assert PlanDriver(worker, 99).run(jobs) == alone
    worker.close()


def test_a_graph_reads_what_its_tensors_hold_now() -> None:
    source = torch.ones(1000, device=CUDA)
    with torch.inference_mode():
        again = CudaGraphRecorder(CUDA).record(lambda: (source * 2 + 1,))
        source.fill_(5.0)
        assert again()[0].eq(11.0).all()


def test_staged_arrays_arrive_whole_while_the_device_is_busy() -> None:
    transfer = PinnedTransfer(CUDA, 64)
    busy = torch.randn(4096, 4096, device=CUDA)
    arrived, sent = [], []
    for step in range(40):
        transfer.begin_step()
        for _ in range(3):
            busy = (busy @ busy).clamp(-1, 1)
        array = np.arange(100_000, dtype=np.int64) + step
        sent.append(array.copy())
        arrived.append(transfer.upload(array))
    for array, tensor in zip(sent, arrived, strict=True):
        assert np.array_equal(tensor.cpu().numpy(), array)


def test_tokens_come_back_in_order() -> None:
    transfer = PinnedTransfer(CUDA, 64)
    reads = []
    for step in range(2):
        transfer.begin_step()
        ids = torch.arange(64, device=CUDA) + step
        reads.append(transfer.fetch(Sampled(ids, ids >= 0)))
    assert [read().token_ids for read in reads] == [list(range(64)), list(range(1, 65))]


def test_of_equal_logits_the_lowest_id_is_best() -> None:
    logits = torch.zeros(64, 128_256, dtype=torch.bfloat16, device=CUDA)
    places = torch.randint(0, 100_000, (64,), generator=torch.Generator().manual_seed(0))
    for row, place in enumerate(places.tolist()):
        logits[row, place::7] = 3.0
    assert find_peaks(logits).token_ids.tolist() == places.tolist()


def test_the_pool_leaves_room_for_the_largest_step(folder: Path) -> None:
    config = WorkerConfig(
        model_folder=folder, device=Device.CUDA, dtype=ModelDtype.BFLOAT16, backend="cuda", kv_cache_fraction=0.9
    )
    worker = build_worker(config)
    free, total = torch.cuda.mem_get_info()
    assert worker.info.num_blocks * worker.info.kv_bytes_per_block > 0.5 * total
    assert free > 0.02 * total
    jobs = jobs_of()
    PlanDriver(worker).run(jobs, at_most(128))
    worker.close()


def test_graphs_multiply_packed_weights_as_eager_steps_do() -> None:
    """Few rows by the kernel, many through the one unpacked matrix."""
    products = choose_products(CUDA, torch.bfloat16, 4, 64)
    assert products.name == "triton"
    scratch = Scratch(torch.bfloat16, CUDA)
    scratch.reserve(256 * 512)
    matrix = pack_matrix(quantise(torch.randn(256, 512, device=CUDA), 4, 64), 4)
    linear = PackedLinear(matrix, None, None, products, scratch)
    for rows in (4, 100):
        inputs = torch.zeros(rows, 512, device=CUDA, dtype=torch.bfloat16)
        with torch.inference_mode():
            again = CudaGraphRecorder(CUDA).record(partial(lambda held: (linear(held),), inputs))
            inputs.normal_()
            assert torch.equal(again()[0], linear(inputs))


@pytest.mark.parametrize("weight_format", [WeightFormat.INT4, WeightFormat.INT8])
def test_packed_weights_decode_as_unpacked_ones(
    folder: Path, weight_format: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel, and as if there were none: the measured errors are alike, and nearly all tokens."""
    found = []
    for without in (False, True):
        if without:
            monkeypatch.setattr(packed_choice, "has_triton", lambda: False)
        worker = worker_of(folder, weight_format=weight_format)
        assert worker.info.weights is not None
        assert worker.info.weights.error is not None
        found.append((PlanDriver(worker).run(jobs_of(), at_most(64)), worker.info.weights.error.relative))
        worker.close()
    (kernel, error), (unpacked, other) = found
    assert error == pytest.approx(other, rel=0.2)
    firsts = [(ours[0], theirs[0]) for ours, theirs in zip(kernel, unpacked, strict=True)]
    assert sum(ours == theirs for ours, theirs in firsts) >= len(firsts) - 1
