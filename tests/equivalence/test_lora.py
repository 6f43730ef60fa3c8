"""Adapters mixed in one batch give the tokens of transformers with PEFT, and nobody's tokens depend on neighbours."""

import random
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from engine_service.core.sampling import SamplingParams
from engine_service.worker.lora.adapter import Adapter, LowRank
from tests.fixtures.adapters import FOUR, AdapterShape, PeftReference, write_adapter
from tests.fixtures.checkpoints import HIST_VOCAB, write_hist, write_random_model
from tests.fixtures.engine_run import EngineRun, EngineSize

COUNT = 24
PREFIX = random.Random(0).choices(range(1, HIST_VOCAB), k=70)
GREEDY = SamplingParams(max_tokens=COUNT, seed=0, temperature=0.0, ignore_eos=True)
BASE = 0
NUMBERS = (BASE, 1, 2, 3, 4)
# Each prompt with the model itself and with every adapter: neighbours differ in the adapter alone.
PROMPTS = [[*PREFIX[:40], 9], [*PREFIX, 5, 6], [7, 8, 9]]
MIXED = [(prompt, number) for prompt in PROMPTS for number in NUMBERS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hist(tmp_path_factory.mktemp("hist"), tokenizer=False)


@pytest.fixture(scope="module")
def adapters(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    place = tmp_path_factory.mktemp("adapters")
    return {seed: write_adapter(place / str(seed), folder, shape, seed) for seed, shape in enumerate(FOUR, 1)}


@pytest.fixture(scope="module")
def answers(folder: Path, adapters: dict[int, Path]) -> list[list[int]]:
    reference = PeftReference(folder, {str(number): path for number, path in adapters.items()})
    return [reference.greedy(str(number or ""), prompt, COUNT) for prompt, number in MIXED]


def opened(size: EngineSize, folder: Path, backend: str, adapters: dict[int, Path]) -> EngineRun:
    run = EngineRun(replace(size, max_loras=len(adapters)), folder, backend)
    for number, path in adapters.items():
        run.install(number, path)
    return run


def run_mixed(run: EngineRun) -> list[list[int]]:
    got = run.run([(prompt, GREEDY) for prompt, _ in MIXED], adapters=[number for _, number in MIXED])
    return [answer.token_ids for answer in got]


@dataclass(frozen=True)
class Case:
    """`rounds`: how often all requests are sent, so that later rounds find the cache warm."""

    size: EngineSize = field(default_factory=lambda: EngineSize(max_num_requests=16, joining=4))
    rounds: int = 1
    preempts: bool = False


CASES = {
    "roomy": Case(),
    "warm": Case(rounds=2),
    "overlap": Case(EngineSize(overlap=True)),
    "chunk_7": Case(EngineSize(chunk=7, budget=24)),
    "small_pool": Case(EngineSize(num_blocks=20), preempts=True),
    "guessing": Case(EngineSize(max_draft_tokens=4), rounds=2),
}


class NoRoom(LowRank):
    """A layer's update that finds no memory."""

    def scaled_up(self, scale: float) -> torch.Tensor:
        raise MemoryError(f"no room for {self.up.shape} times {scale}")


def without_room_at_its_end(adapter: Adapter) -> Adapter:
    last = list(adapter.updates)[-1]
    return replace(adapter, updates={**adapter.updates, last: NoRoom(*adapter.updates[last])})


@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_of_one_that_finds_no_memory_nothing_is_kept(
    backend: str, folder: Path, adapters: dict[int, Path], answers: list[list[int]]
) -> None:
    """Its place may have another one, which is not mixed with what was there of it."""
    run = opened(CASES["roomy"].size, folder, backend, {1: adapters[1], 2: adapters[2]})
    try:
        with pytest.raises(MemoryError):
            run.install(3, adapters[4], without_room_at_its_end)
        run.install(3, adapters[3])
        wanted = {number: answers[place] for place, (prompt, number) in enumerate(MIXED) if prompt is PROMPTS[0]}
        got = run.run([(PROMPTS[0], GREEDY)] * 4, adapters=[0, 1, 2, 3])
        assert [answer.token_ids for answer in got] == [wanted[number] for number in (0, 1, 2, 3)]
    finally:
        run.close()


@pytest.mark.parametrize(
    ("name", "backend"),
    [(name, "cpu") for name in CASES]
    + [(name, backend) for name in ("roomy", "small_pool") for backend in ("torch", "cuda")],
)
def test_mixed_is_peft(
    name: str, backend: str, folder: Path, adapters: dict[int, Path], answers: list[list[int]]
) -> None:
    """B048 too: chunked, preempted, cached; four adapters and the model itself in the same steps."""
    assert len({tuple(answer) for answer in answers}) == len(answers)
    case = CASES[name]
    run = opened(case.size, folder, backend, adapters)
    for _ in range(case.rounds):
        assert run_mixed(run) == answers
    assert (run.scheduler.stats().preemptions > 0) == case.preempts
    run.close()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_prefixes_are_shared_within_an_adapter_alone(backend: str, folder: Path, adapters: dict[int, Path]) -> None:
    run = opened(EngineSize(), folder, backend, adapters)
    hits = []
    for number in (BASE, 1, 2, 1, BASE, 2):
        before = run.scheduler.stats().cached_tokens
        run.run([(PROMPTS[1], GREEDY)], adapters=[number])
        hits.append(run.scheduler.stats().cached_tokens - before)
    assert hits == [0, 0, 0, 64, 64, 64]
    run.close()


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_logits_of_the_model_itself_are_the_same_bits(backend: str, folder: Path, adapters: dict[int, Path]) -> None:
    """Beside adapters or alone: what a request without one gets is exactly the same."""
    params = replace(GREEDY, logprobs=5)
    alone = opened(EngineSize(max_num_requests=16), folder, backend, {})
    beside = opened(EngineSize(max_num_requests=16, joining=16), folder, backend, adapters)
    wanted = alone.run([(PROMPTS[0], params)])[0]
    got = beside.run([(PROMPTS[0], params)] * 5, adapters=list(NUMBERS))
    if backend == "cpu":
        assert got[BASE].logprobs == wanted.logprobs
    assert got[BASE].token_ids == wanted.token_ids
    alone.close()
    beside.close()


def test_an_adapter_is_dropped_and_its_number_never_means_another(folder: Path, adapters: dict[int, Path]) -> None:
    run = opened(EngineSize(), folder, "cpu", {1: adapters[1]})
    first = run.run([(PROMPTS[0], GREEDY)], adapters=[1])[0].token_ids
    run.drop(1)
    run.install(2, adapters[1])
    assert run.run([(PROMPTS[0], GREEDY)], adapters=[2])[0].token_ids == first
    assert run.run([(PROMPTS[0], GREEDY)], adapters=[BASE])[0].token_ids != first
    run.close()


@pytest.mark.parametrize("dense", [True, False])
def test_other_families_by_hooks(dense: bool, tmp_path: Path) -> None:
    """A model that has no fused decoder: its own linear layers, whatever they are called."""
    config = GPTNeoXConfig(
        vocab_size=HIST_VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=512,
        use_parallel_residual=dense,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = write_random_model(tmp_path / "model", GPTNeoXForCausalLM, config)
    shape = AdapterShape(8, ("query_key_value", "dense_h_to_4h"), 16)
    adapter = write_adapter(tmp_path / "adapter", model, shape, 1)
    reference = PeftReference(model, {"1": adapter})
    run = opened(EngineSize(joining=4), model, "cpu", {1: adapter})
    numbers = [0, 1, 1, 0]
    prompts = [PROMPTS[0], PROMPTS[0], PROMPTS[2], PROMPTS[2]]
    got = run.run([(prompt, GREEDY) for prompt in prompts], adapters=numbers)
    wanted = [
        reference.greedy(str(number or ""), prompt, COUNT) for prompt, number in zip(prompts, numbers, strict=True)
    ]
    assert [answer.token_ids for answer in got] == wanted
    run.close()
