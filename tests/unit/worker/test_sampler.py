"""The vectorized sampler against the slow reference, row by row; neighbours, ties, unsound rows."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.core.sampling import SamplingParams
from engine_service.worker.philox import uniforms
from engine_service.worker.sampler import Sampler
from engine_service.worker.sampling_rows import SamplingRows
from tests.fixtures.reference_sampling import sample_one

CPU = torch.device("cpu")
OFF = SamplingParams(max_tokens=1, seed=0)


def rows_of(
    params: list[SamplingParams], positions: list[int], banned: dict[int, frozenset[int]] | None = None
) -> SamplingRows:
    pairs = [(row, token) for row, tokens in (banned or {}).items() for token in sorted(tokens)]
    seeds = np.array([one.seed for one in params], dtype=np.int64)
    return SamplingRows(
        temperature=np.array([one.temperature for one in params], dtype=np.float32),
        top_k=np.array([one.top_k for one in params], dtype=np.int64),
        top_p=np.array([one.top_p for one in params], dtype=np.float64),
        min_p=np.array([one.min_p for one in params], dtype=np.float32),
        uniforms=uniforms(seeds, np.array(positions, dtype=np.int64)),
        suppressed=np.array(pairs, dtype=np.int64).T.copy() if pairs else None,
    )


def sample(logits: torch.Tensor, params: list[SamplingParams], positions: list[int]) -> list[int]:
    sampled = Sampler(logits.shape[1], CPU).sample(logits.clone(), rows_of(params, positions))
    assert sampled.sound.all()
    return sampled.token_ids.tolist()


PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.0, 1e-45, 0.1, 0.7, 1.0, 2.5, 50.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 40, 41, 200, 250, 300, 899, 901, 999, 1000, 2**31, 2**63 - 1]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.5]),
)


@settings(max_examples=60, deadline=None)
@given(
    params=st.lists(PARAMS, min_size=1, max_size=36),
    vocab=st.sampled_from([3, 255, 256, 257, 1000, 5000]),
    spread=st.sampled_from([0.0, 0.05, 1.0, 8.0]),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equals_the_slow_reference(
    params: list[SamplingParams], vocab: int, spread: float, seed: int, dtype: torch.dtype
) -> None:
    """B084: any mix of rows, top_k beyond the vocabulary included; flat rows and bfloat16 are full of ties."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(len(params), vocab, generator=generator) * spread).to(dtype)
    positions = list(range(len(params)))
    expected = [
        sample_one(row, one, position) for row, one, position in zip(logits.tolist(), params, positions, strict=True)
    ]
    assert sample(logits, params, positions) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neighbours_change_nothing(dtype: torch.dtype) -> None:
    """Every row alone, and in batches of any company and order, gives the same token."""
    draw = random.Random(3)
    choices = [
        OFF,
        replace(OFF, top_k=20),
        replace(OFF, top_p=0.9),
        replace(OFF, min_p=0.01),
        replace(OFF, temperature=0.0),
        replace(OFF, top_k=700, top_p=0.95, temperature=1.4),
    ]
    params = [replace(draw.choice(choices), seed=draw.getrandbits(62)) for _ in range(70)]
    logits = (torch.randn(70, 5001, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    alone = [sample(logits[row : row + 1], [params[row]], [row])[0] for row in range(70)]
    assert sample(logits, params, list(range(70))) == alone
    order = draw.sample(range(70), 70)
    assert sample(logits[order], [params[row] for row in order], order) == [alone[row] for row in order]


def test_equal_logits_are_won_by_the_lowest_id() -> None:
    logits = torch.full((4, 2000), 1.5, dtype=torch.bfloat16)
    logits[:, :7] = 0.0
    params = [
        replace(OFF, temperature=0.0),
        replace(OFF, top_k=1),
        replace(OFF, top_p=1e-9),
        replace(OFF, temperature=1e-45),
    ]
    assert sample(logits, params, [0, 1, 2, 3]) == [7, 7, 7, 7]
    few = {sample(logits[:1], [replace(OFF, top_k=3, seed=seed)], [0])[0] for seed in range(60)}
    assert few == {7, 8, 9}


def test_uniform_logits_give_many_tokens_of_even_counts() -> None:
    """B079: one seed, 3,000 positions over a flat distribution of 64 tokens."""
    count, vocab = 3000, 64
    tokens = sample(torch.zeros(count, vocab), [replace(OFF, seed=9)] * count, list(range(count)))
    counts = np.bincount(tokens, minlength=vocab)
    chi_square = float(((counts - count / vocab) ** 2 / (count / vocab)).sum())
    assert 25 < chi_square < 120  # 63 degrees of freedom


def test_drawn_frequencies_follow_the_distribution() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0, float("-inf")]])
    count = 20_000
    expected = torch.softmax(logits[0] / 0.8, 0) * count
    for params in (replace(OFF, temperature=0.8), replace(OFF, temperature=0.8, top_k=4)):
        tokens = sample(logits.expand(count, -1), [replace(params, seed=4)] * count, list(range(count)))
        counts = torch.bincount(torch.tensor(tokens), minlength=5)
        assert counts[4] == 0
        assert float(((counts - expected)[:4] ** 2 / expected[:4]).sum()) < 22  # 3 degrees of freedom


@pytest.mark.parametrize("bad", ["nan", "inf", "all_minus_inf"])
@pytest.mark.parametrize("params", [OFF, replace(OFF, temperature=0.0), replace(OFF, top_k=5, top_p=0.9)])
def test_an_unsound_row_is_reported_and_harms_no_other(bad: str, params: SamplingParams) -> None:
    """B150."""
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(2))
    clean = sample(logits, [params] * 3, [0, 1, 2])
    if bad == "all_minus_inf":
        logits[1] = float("-inf")
    else:
        logits[1, 77] = float(bad)
    sampled = Sampler(500, CPU).sample(logits, rows_of([params] * 3, [0, 1, 2]))
    assert sampled.sound.tolist() == [True, False, True]
    assert sampled.token_ids.tolist() == [clean[0], 0, clean[2]]


def test_suppressed_tokens_never_come() -> None:
    """B083: greedy and sampled rows in one batch, each with its own ban."""
    logits = torch.randn(4, 300, generator=torch.Generator().manual_seed(5)) * 4
    params = [replace(OFF, temperature=0.0), OFF, replace(OFF, top_k=5), replace(OFF, top_p=0.5)]
    best = logits.topk(10).indices
    banned = {row: frozenset(best[row].tolist()) for row in (0, 1, 3)}
    for position in range(50):
        rows = rows_of(params, [position] * 4, banned)
        got = Sampler(300, CPU).sample(logits.clone(), rows).token_ids.tolist()
        assert got == [
            sample_one(logits[row].tolist(), params[row], position, banned.get(row, frozenset())) for row in range(4)
        ]
