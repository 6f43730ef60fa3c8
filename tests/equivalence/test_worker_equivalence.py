"""The worker's tokens do not depend on how they were scheduled, and are those of a plain model (float32)."""

import json
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine_service.core.plan import Chunk, NewRequest, Plan
from engine_service.core.sampling import SamplingParams
from engine_service.worker.backend import StepLogits
from engine_service.worker.build import build_worker
from engine_service.worker.config import WorkerConfig
from engine_service.worker.input_batch import StepInput
from engine_service.worker.worker import Worker
from tests.fixtures.checkpoints import HIST_VOCAB, greedy_of, load_reference, write_hist
from tests.fixtures.plan_driver import ChunkSize, Job, PlanDriver, at_most, whole
from tests.fixtures.reference_sampling import generate

LENGTHS = (1, 2, 15, 16, 17, 33, 100, 5)
COUNT = 20


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(HIST_VOCAB), k=length)


PROMPTS = [prompt_of(length, seed) for seed, length in enumerate(LENGTHS)]
GREEDY = SamplingParams(max_tokens=COUNT, seed=0, temperature=0.0)
# With a seed of 7 a draw lies 1.5e-7 beside a boundary, and rounding decides.
FIRST_SEED = 8
SAMPLED = [
    SamplingParams(max_tokens=COUNT, seed=FIRST_SEED),
    SamplingParams(max_tokens=COUNT, seed=-3, temperature=0.7, top_k=40),
    SamplingParams(max_tokens=COUNT, seed=2**63 - 1, temperature=1.3, top_p=0.9),
    SamplingParams(max_tokens=COUNT, seed=11, temperature=2.0, min_p=0.05),
    GREEDY,
    SamplingParams(max_tokens=COUNT, seed=5, temperature=1.5, top_k=100, top_p=0.8, min_p=0.01),
    SamplingParams(max_tokens=COUNT, seed=0, temperature=1.5, top_p=0.99),
    SamplingParams(max_tokens=COUNT, seed=7),
]


# The cuda backend on a CPU: the reference kernel with blocks of one page and of two, and graphs that are run again.
WORKERS = [("torch", 1), ("torch", 16), ("cpu", 16), ("cpu", 32), ("cuda", 16), ("cuda", 32)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"), tokenizer=False)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return load_reference(folder)


@pytest.fixture(scope="module", params=WORKERS, ids=str)
def worker(folder: Path, request: pytest.FixtureRequest) -> Iterator[Worker]:
    backend, size = request.param
    config = WorkerConfig(model_folder=folder, backend=backend, num_blocks=8192 // size, block_size=size, threads=1)
    # A graph's work grows with the longest request that may come.
    built = build_worker(replace(config, max_model_len=512) if backend == "cuda" else config)
    assert built.info.backend == backend
    yield built
    built.close()


def jobs_of(params: list[SamplingParams]) -> list[Job]:
    return [Job(list(prompt), chosen) for prompt, chosen in zip(PROMPTS, params, strict=True)]


def one_by_one(worker: Worker, params: list[SamplingParams]) -> list[list[int]]:
    return [PlanDriver(worker, seed).run([job])[0] for seed, job in enumerate(jobs_of(params))]


def random_sizes(seed: int) -> ChunkSize:
    draw = random.Random(seed)
    return lambda _request, remaining: draw.randint(1, remaining)


@pytest.fixture(scope="module")
def greedy_answers(reference: Any) -> list[list[int]]:
    return [greedy_of(reference, prompt, COUNT) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def sampled_answers(reference: Any) -> list[list[int]]:
    def next_logits(tokens: list[int]) -> list[float]:
        with torch.no_grad():
            return reference(torch.tensor([tokens])).logits[0, -1].tolist()

    return [generate(next_logits, prompt, chosen) for prompt, chosen in zip(PROMPTS, SAMPLED, strict=True)]


def test_alone_is_transformers(worker: Worker, greedy_answers: list[list[int]]) -> None:
    assert one_by_one(worker, [GREEDY] * len(PROMPTS)) == greedy_answers


def test_sampled_alone_is_the_slow_reference(worker: Worker, sampled_answers: list[list[int]]) -> None:
    assert one_by_one(worker, SAMPLED) == sampled_answers
    assert len({tuple(answer) for answer in sampled_answers}) == len(SAMPLED)


@pytest.mark.parametrize(
    "chunk_size",
    [whole, at_most(1), at_most(7), at_most(16), at_most(64), random_sizes(1), random_sizes(2)],
    ids=["whole", "1", "7", "16", "64", "random1", "random2"],
)
def test_batched_and_chunked_is_alone(
    worker: Worker,
    chunk_size: ChunkSize,
    greedy_answers: list[list[int]],
    sampled_answers: list[list[int]],
) -> None:
    """B068, B069: intermediate chunks give no token; short and long prompts share steps."""
    assert PlanDriver(worker).run(jobs_of([GREEDY] * len(PROMPTS)), chunk_size) == greedy_answers
    assert PlanDriver(worker).run(jobs_of(SAMPLED), chunk_size) == sampled_answers


def test_arriving_late_mixes_prefill_with_decode(worker: Worker, sampled_answers: list[list[int]]) -> None:
    jobs = jobs_of(SAMPLED)
    for place, job in enumerate(jobs):
        job.arrives = 3 * place
    assert PlanDriver(worker).run(jobs, at_most(5)) == sampled_answers


def test_second_plan_before_the_first_result(worker: Worker, sampled_answers: list[list[int]]) -> None:
    """A chunk may start with a token that no one has read yet."""
    assert PlanDriver(worker).run(jobs_of(SAMPLED), at_most(9), in_flight=2) == sampled_answers


def test_preempted_is_not_preempted(worker: Worker, sampled_answers: list[list[int]]) -> None:
    """B060: after recompute every random number and every token is as before."""
    jobs = jobs_of(SAMPLED)
    for place, job in enumerate(jobs):
        job.preempted_after = 1 + 2 * place
    assert PlanDriver(worker).run(jobs, at_most(16)) == sampled_answers


def test_shared_prefix_blocks_are_as_good_as_own(worker: Worker, reference: Any) -> None:
    """B054: a prompt whose first blocks another request computed is answered as if cold."""
    size = worker.info.block_size
    common = prompt_of(3 * size + 1, 99)
    first = Job([*common, 5, 6], SamplingParams(max_tokens=COUNT, seed=0, temperature=0.0))
    second = Job([*common, 9, 10, 11], GREEDY, arrives=1, prefix_of=first, shared_blocks=3)
    third = Job([*common[: 2 * size], 9, 1], GREEDY, arrives=2, prefix_of=first, shared_blocks=2)
    answers = PlanDriver(worker).run([first, second, third])
    assert answers == [greedy_of(reference, job.prompt, COUNT) for job in (first, second, third)]


def test_a_dropped_request_leaves_no_trace(worker: Worker, greedy_answers: list[list[int]]) -> None:
    """A row taken over from a longer, sampled request behaves like new; unknown drops are nothing."""
    params = SamplingParams(max_tokens=5, seed=1, temperature=9.0)
    PlanDriver(worker).run([Job(prompt_of(200, seed), params) for seed in range(8)])
    worker.submit(Plan(0, (), (), (123456,)))
    assert worker.result().sampled == ()
    assert PlanDriver(worker).run(jobs_of([GREEDY] * len(PROMPTS))) == greedy_answers


def test_teacher_forced_logits(worker: Worker, reference: Any) -> None:
    """Logits at every position of a chunked prompt, to rounding, against a plain forward pass."""
    prompt = prompt_of(75, 3)
    with torch.no_grad():
        expected = reference(torch.tensor([prompt])).logits[0]
    runner, seen = worker._runner, []

    class Recorder:
        def run(self, step: StepInput, *, best_only: bool) -> StepLogits:
            output = runner.run(step, best_only=False)
            assert output.logits is not None
            seen.append(output.logits.clone())
            return output

        def close(self) -> None: ...

    worker._runner = Recorder()
    try:
        _prefill_sampling_everywhere(worker, prompt)
    finally:
        worker._runner = runner
    got = torch.cat(seen)
    assert torch.allclose(got, expected, atol=2e-4, rtol=0)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def _prefill_sampling_everywhere(worker: Worker, prompt: list[int]) -> None:
    """One request per prefix, all in one plan, every prefix with its own blocks."""
    size = worker.info.block_size
    request, chunk_list, free = [], [], iter(range(worker.info.num_blocks))
    for length in range(1, len(prompt) + 1):
        blocks = tuple(next(free) for _ in range(-(-length // size)))
        request.append(NewRequest(length, tuple(prompt[:length]), length, blocks, GREEDY))
        chunk_list.append(Chunk(length, 0, length, (), True))
    for begin in range(0, len(prompt), 25):
        part = slice(begin, begin + 25)
        ids = tuple(new.request_id for new in request[part])
        worker.submit(Plan(begin, tuple(chunk_list[part]), tuple(request[part])))
        worker.result()
        worker.submit(Plan(begin, (), (), ids))
        worker.result()


@pytest.mark.parametrize("top_k", [0, 512, 513, 9_999_999, 2**31, 2**63 - 1])
def test_top_k_of_the_whole_vocabulary_is_off(worker: Worker, top_k: int, sampled_answers: list[list[int]]) -> None:
    """B084, B085: mixed with a greedy neighbour."""
    params = SamplingParams(max_tokens=COUNT, seed=FIRST_SEED, top_k=top_k)
    jobs = [Job(list(PROMPTS[0]), params), Job(list(PROMPTS[4]), GREEDY)]
    assert PlanDriver(worker).run(jobs) == [sampled_answers[0], sampled_answers[4]]


@pytest.mark.parametrize(
    "changes",
    [
        {"top_k": 1},
        {"top_p": 1e-9},
        {"temperature": 1e-45},
        {"temperature": 1e-6},
        {"min_p": 1.0},
        {"top_k": 511, "top_p": 1e-9},
    ],
    ids=str,
)
def test_what_must_equal_greedy(worker: Worker, changes: dict[str, Any], greedy_answers: list[list[int]]) -> None:
    """B084; a temperature near zero overflows nothing."""
    params = SamplingParams(**{"max_tokens": COUNT, "seed": 3, "temperature": 1.0, **changes})
    assert PlanDriver(worker).run(jobs_of([params] * len(PROMPTS))) == greedy_answers


def test_stop_tokens_are_not_sampled_before_min_tokens(
    worker: Worker, reference: Any, greedy_answers: list[list[int]]
) -> None:
    """B083: greedy with banned ids beside sampled rows; the ban is lifted after min_tokens."""
    stops = frozenset(greedy_answers[6][:8])
    params = SamplingParams(max_tokens=COUNT, seed=0, temperature=0.0, min_tokens=10, stop_token_ids=stops | {10**9})
    expected = _greedy_with_ban(reference, PROMPTS[6], COUNT, stops | {0}, until=10)
    jobs = [Job(list(PROMPTS[0]), SAMPLED[0]), Job(list(PROMPTS[6]), params)]
    assert PlanDriver(worker).run(jobs)[1] == expected
    assert not (stops | {0}) & set(expected[:10])
    assert expected != greedy_answers[6]


def _greedy_with_ban(model: Any, prompt: list[int], count: int, banned: frozenset[int], until: int) -> list[int]:
    tokens = list(prompt)
    for place in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([tokens])).logits[0, -1]
        if place < until:
            logits[sorted(banned)] = float("-inf")
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def test_eos_is_free_when_ignored(tmp_path: Path) -> None:
    """`min_tokens` bans the end of text only where it would end the request."""
    folder = write_hist(tmp_path, tokenizer=False)
    params = SamplingParams(max_tokens=4, seed=0, temperature=0.0, min_tokens=4)
    both = [params, replace(params, ignore_eos=True)]

    def answers() -> list[list[int]]:
        worker = build_worker(WorkerConfig(model_folder=folder, num_blocks=64, threads=1))
        return PlanDriver(worker).run([Job(list(PROMPTS[6]), chosen) for chosen in both])

    free = answers()
    assert free[0] == free[1]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, free[0][1]]}))
    banned, ignored = answers()
    assert ignored == free[1]
    assert banned[0] == free[0][0]
    assert free[0][1] not in banned
