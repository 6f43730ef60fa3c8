"""Does the backend compute what transformers computes? Prefills in chunks, then decodes, position by position.

Must not know: timing, the worker's queue of plans.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.models import CheckedModel
from engine_service.core.plan import Chunk, NewRequest, Plan
from engine_service.core.sampling import SamplingParams
from engine_service.worker.backend import LoadedModel
from engine_service.worker.build import build_batch
from engine_service.worker.config import WorkerConfig
from engine_service.worker.ranks import RankPool

LEAST_TOLERANCE = 1e-3
TIMES_TRANSFORMERS = 1.5
"""How far rounding moves logits depends on the model: transformers' own run in the same dtype is the yardstick. So many
times its largest error against float32 may ours be."""

_DECODES = 12
_BUDGET = 300


@dataclass(frozen=True, slots=True)
class Equality:
    """`largest_error` over all positions, of the logits against transformers in float32, relative to their norm;
    `tolerance` follows from what transformers itself loses in the model's dtype. `others`: positions whose best token
    differs although the two best in float32 are further apart than the tolerance."""

    model: str
    attention: str
    positions: int
    largest_error: float
    tolerance: float
    others: int

    @property
    def holds(self) -> bool:
        return self.largest_error <= self.tolerance and self.others == 0  # NaN never passes


class Forward:
    """A backend's steps one by one, with their logits."""

    def __init__(self, loaded: LoadedModel, config: WorkerConfig, pool: RankPool) -> None:
        self._transfer = loaded.transfer()
        self._batch = build_batch(config, loaded, pool, self._transfer.upload)
        self._runner = loaded.build(pool.block_size, pool.num_blocks, pool.max_model_len)

    def run(self, plan: Plan) -> torch.Tensor:
        """Logits [R, vocabulary], a copy; the best tokens are appended to their requests."""
        with torch.inference_mode():
            self._transfer.begin_step()
            self._batch.take(plan)
            step = self._batch.step_input(plan.chunks)
            output = self._runner.run(step, best_only=False)
            assert output.logits is not None
            logits = output.logits.clone()
            if len(logits):
                self._batch.store(step, logits.max(dim=-1).indices)
            return logits

    def close(self) -> None:
        self._runner.close()


def check_equality(
    model: CheckedModel, loaded: LoadedModel, config: WorkerConfig, pool: RankPool, attention: str
) -> Equality:
    """Prompts of many lengths at once; the first chunks of the long ones share steps with decodes of the short ones."""
    lengths = [length for length in (1, 2, 16, 17, 100, 257, 600) if length + _DECODES < pool.max_model_len]
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randint(0, loaded.facts.vocab_size, (length,), generator=generator).tolist() for length in lengths]
    forward = Forward(loaded, config, pool)
    seen = _generate(forward, prompts, pool)
    forward.close()
    sequences = [[*prompt, *logits.argmax(-1).tolist()[:-1]] for prompt, logits in zip(prompts, seen, strict=True)]
    counts = [len(logits) for logits in seen]
    with model.as_transformers_has_it() as bare:
        own = torch.cat([_logits(bare, tokens, count) for tokens, count in zip(sequences, counts, strict=True)])
        exact = model.exact()
    expected = torch.cat([_logits(exact, tokens, count) for tokens, count in zip(sequences, counts, strict=True)])
    return _compare(model.name, attention, torch.cat(seen), own, expected)


def _compare(name: str, attention: str, ours: torch.Tensor, own: torch.Tensor, expected: torch.Tensor) -> Equality:
    """All float32 [positions, vocabulary]: of the backend, of transformers in the same dtype and in float32."""
    tolerance = max(LEAST_TOLERANCE, TIMES_TRANSFORMERS * _largest_error(own, expected))
    best = expected.topk(2).values
    is_clear = best[:, 0] - best[:, 1] > tolerance * expected.abs().amax(-1)
    others = int((is_clear & (ours.argmax(-1) != expected.argmax(-1))).sum())
    return Equality(name, attention, len(ours), _largest_error(ours, expected), tolerance, others)


def _largest_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """NaN if one is."""
    return float(((logits - expected).norm(dim=-1) / expected.norm(dim=-1)).max())


def _generate(forward: Forward, prompts: Sequence[Sequence[int]], pool: RankPool) -> list[torch.Tensor]:
    """Per request: logits float32 [1 + decodes, vocabulary] of the last prompt token and of each token after it."""
    plans = _plans(prompts, pool)
    found: dict[int, list[torch.Tensor]] = {number: [] for number in range(len(prompts))}
    for plan in plans:
        sampling = [chunk.request_id for chunk in plan.chunks if chunk.samples]
        for request_id, row in zip(sampling, forward.run(plan).float().unbind(0), strict=True):
            found[request_id].append(row)
    return [torch.stack(rows) for rows in found.values()]


def _plans(prompts: Sequence[Sequence[int]], pool: RankPool) -> Iterable[Plan]:
    """Every request in every step until it has its tokens, within a budget that splits the long prompts."""
    size = pool.block_size
    ends = [len(prompt) + _DECODES for prompt in prompts]
    computed = [0] * len(prompts)
    # Blocks from the last to the first, so that none lies where its number in the request would put it.
    free = iter(range(pool.num_blocks - 1, -1, -1))
    held = [0] * len(prompts)
    step = 0
    while any(done < end for done, end in zip(computed, ends, strict=True)):
        room, chunks, new = _BUDGET, [], []
        for number, prompt in enumerate(prompts):
            left = max(1, len(prompt) - computed[number])
            length = min(left, room)
            if computed[number] >= ends[number] or length == 0:
                continue
            start, end = computed[number], computed[number] + length
            blocks = tuple(next(free) for _ in range(-(-end // size) - held[number]))
            held[number] += len(blocks)
            if start == 0:
                new.append(NewRequest(number, tuple(prompt), len(prompt), (), _GREEDY))
            chunks.append(Chunk(number, start, length, blocks, end >= len(prompt)))
            computed[number] = end
            room -= length
        step += 1
        yield Plan(step, tuple(sorted(chunks, key=lambda chunk: chunk.length > 1)), tuple(new))


_GREEDY = SamplingParams(max_tokens=1_000_000, seed=0, temperature=0.0, ignore_eos=True)


def _logits(bare: Any, tokens: list[int], count: int) -> torch.Tensor:
    """Of a transformers model: float32 [count, vocabulary] at the last positions."""
    with torch.inference_mode():
        ids = torch.tensor([tokens], device=bare.device)
        logits: torch.Tensor = bare(input_ids=ids, use_cache=False, logits_to_keep=count).logits[0]
        return logits.float()
