"""Tokens drawn by every variant of the kernels, against the slow reference and the torch sampler."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_service.core.sampling import SamplingParams
from engine_service.worker.kernels.library import ThreadTeam
from engine_service.worker.kernels.row_draw import KernelDraw
from engine_service.worker.philox import uniforms
from engine_service.worker.sampled import Sampled
from engine_service.worker.sampler import Sampler
from engine_service.worker.sampling_rows import SamplingRows, TokenMasks
from tests.fixtures.reference_sampling import sample_one

CPU = torch.device("cpu")
OFF = SamplingParams(max_tokens=1, seed=0)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.0, 1e-45, 0.1, 0.7, 1.0, 2.5, 50.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 250, 999, 1000, 2**31, 2**63 - 1]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
)
_SLOW_FIXTURE = [HealthCheck.function_scoped_fixture]


def rows_of(params: list[SamplingParams], masks: TokenMasks | None = None) -> SamplingRows:
    """Row i is at position i."""
    seeds = np.array([one.seed for one in params], dtype=np.int64)
    return SamplingRows(
        temperature=np.array([one.temperature for one in params], dtype=np.float32),
        top_k=np.array([one.top_k for one in params], dtype=np.int64),
        top_p=np.array([one.top_p for one in params], dtype=np.float64),
        min_p=np.array([one.min_p for one in params], dtype=np.float32),
        uniforms=uniforms(seeds, np.arange(len(params), dtype=np.int64)),
        masks=masks,
    )


def random_masks(places: list[int], vocab: int, share: float, seed: int) -> tuple[TokenMasks, list[set[int]]]:
    """A token or more are left in each row; and what the masks exclude."""
    draw = np.random.default_rng(seed)
    allowed = draw.random((len(places), vocab)) < share
    allowed[np.arange(len(places)), draw.integers(0, vocab, len(places))] = True
    padded = np.zeros((len(places), -(-vocab // 32) * 32), dtype=np.bool_)
    padded[:, :vocab] = allowed
    bits = np.packbits(padded, axis=1, bitorder="little").view(np.int32)
    excluded = [set(np.flatnonzero(~row).tolist()) for row in allowed]
    return TokenMasks(np.array(places, dtype=np.int64), torch.from_numpy(bits)), excluded


def random_logits(count: int, vocab: int, spread: float, seed: int) -> torch.Tensor:
    """Rounded to bfloat16, so that many are equal."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, vocab, generator=generator) * spread).bfloat16().float()


def draw(team: ThreadTeam, logits: torch.Tensor, rows: SamplingRows) -> Sampled:
    return Sampler(logits.shape[1], CPU, KernelDraw(logits.shape[1], team)).sample(logits, rows)


@settings(max_examples=40, deadline=None, suppress_health_check=_SLOW_FIXTURE)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=20),
    vocab=st.sampled_from([3, 16, 255, 257, 1000, 2500]),
    spread=st.sampled_from([0.0, 0.05, 1.0, 8.0]),
    share=st.sampled_from([0.002, 0.1, 0.9]),
    seed=st.integers(0, 2**31),
)
def test_equals_the_slow_reference(
    team: ThreadTeam, params: list[SamplingParams], vocab: int, spread: float, share: float, seed: int
) -> None:
    """Every second row has a mask; the model's logits stay as they are."""
    logits = random_logits(len(params), vocab, spread, seed)
    before = logits.clone()
    masks, excluded = random_masks(list(range(0, len(params), 2)), vocab, share, seed)
    banned = [frozenset(excluded[i // 2]) if i % 2 == 0 else frozenset[int]() for i in range(len(params))]
    expected = [sample_one(logits[i].tolist(), one, i, banned[i]) for i, one in enumerate(params)]
    sampled = draw(team, logits, rows_of(params, masks))
    assert sampled.token_ids.tolist() == expected
    assert sampled.has_choice is not None
    assert sampled.has_choice.all()
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    "params",
    [OFF, replace(OFF, temperature=0.3, min_p=0.01), replace(OFF, top_p=0.9), replace(OFF, top_k=50, top_p=0.95)],
)
@pytest.mark.parametrize("share", [0.004, 0.95])
def test_equals_the_torch_sampler(team: ThreadTeam, params: SamplingParams, share: float) -> None:
    """A vocabulary of common size."""
    logits = random_logits(64, 49_152, 2.5, 7)
    masks, _ = random_masks(list(range(0, 64, 2)), 49_152, share, 3)
    rows = rows_of([replace(params, seed=seed) for seed in range(64)], masks)
    assert torch.equal(draw(team, logits, rows).token_ids, Sampler(49_152, CPU).sample(logits, rows).token_ids)


def test_neighbours_change_nothing(team: ThreadTeam) -> None:
    logits = random_logits(24, 5001, 3.0, 1)
    choices = [OFF, replace(OFF, top_k=20), replace(OFF, top_p=0.9), replace(OFF, min_p=0.01)]
    rows = rows_of([replace(choices[i % 4], seed=i) for i in range(24)])
    together = draw(team, logits, rows).token_ids.tolist()
    alone = [draw(team, logits[i : i + 1], rows.settings_of(np.array([i]))).token_ids.tolist()[0] for i in range(24)]
    assert together == alone


@pytest.mark.parametrize("params", [OFF, replace(OFF, top_k=5, top_p=0.9), replace(OFF, temperature=0.0)])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_unsound_rows_and_empty_masks_harm_no_other(team: ThreadTeam, params: SamplingParams, bad: float) -> None:
    """B150. Row 1 is not finite, row 2 has a mask of nothing, row 3 both."""
    logits = random_logits(5, 512, 1.0, 1)
    settings_of_all = [replace(params, seed=seed) for seed in range(5)]
    expected = draw(team, logits, rows_of(settings_of_all)).token_ids.tolist()
    logits[1] = bad
    logits[3, 7] = bad
    masks = TokenMasks(np.array([0, 2, 3]), torch.tensor([[-1] * 16, [0] * 16, [0] * 16], dtype=torch.int32))
    sampled = draw(team, logits, rows_of(settings_of_all, masks))
    assert sampled.sound.tolist() == [True, False, True, False, True]
    assert sampled.has_choice is not None
    assert (sampled.sound & sampled.has_choice).tolist() == [True, False, False, False, True]
    assert sampled.token_ids.tolist() == [expected[0], 0, 0, 0, expected[4]]


def test_masks_that_are_too_short_are_refused(best_team: ThreadTeam) -> None:
    masks = TokenMasks(np.array([0]), torch.full((1, 3), -1, dtype=torch.int32))
    with pytest.raises(ValueError, match="do not cover 100 tokens"):
        draw(best_team, torch.zeros(1, 100), rows_of([OFF], masks))
