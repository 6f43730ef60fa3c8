"""Rules that fill a vocabulary are made ready once for all samples of a prompt."""

from dataclasses import replace

import torch

from engine_service.core.plan import Chunk, NewRequest, Plan
from engine_service.core.sampling import SamplingParams
from engine_service.worker.input_batch import BatchLimits, InputBatch

VOCAB = 5000
ALLOWED = SamplingParams(max_tokens=4, seed=0, allowed_token_ids=frozenset(range(0, VOCAB, 2)))


def take(batch: InputBatch, *settings: SamplingParams) -> list[torch.Tensor | None]:
    """What is added to the logits of each request, as they come in."""
    new = tuple(NewRequest(number, (1, 2), 2, (number,), sampling) for number, sampling in enumerate(settings))
    batch.take(Plan(1, tuple(Chunk(one.request_id, 0, 2, (), True) for one in new), new))
    step = batch.step_input(tuple(Chunk(one.request_id, 0, 2, (), True) for one in new))
    edits = {} if step.sampling.edits is None else {row.place: row.rules.offsets for row in step.sampling.edits.rows}
    return [edits.get(number) for number in range(len(new))]


def test_samples_share_their_rules_and_others_have_their_own() -> None:
    batch = InputBatch(BatchLimits(8, 32, 16, VOCAB), (0,), torch.device("cpu"))
    samples = [replace(ALLOWED, seed=seed) for seed in range(4)]
    other = replace(ALLOWED, allowed_token_ids=frozenset(range(1, VOCAB, 2)))
    first, *rest, apart, plain, again = take(batch, *samples, other, SamplingParams(max_tokens=4, seed=0), ALLOWED)
    assert first is not None
    assert apart is not None
    assert again is not None
    assert all(offsets is first for offsets in rest)
    assert plain is None
    assert torch.isinf(first).tolist() == torch.isinf(again).tolist() == [token % 2 == 1 for token in range(VOCAB)]
    assert torch.isinf(apart).tolist() == [token % 2 == 0 for token in range(VOCAB)]
