"""The nucleus without sorting against sorting: the same tokens, whatever the shape of the distribution."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.worker.nucleus import keep_nucleus


def sorted_nucleus(weights: list[float], top_p: float) -> set[int]:
    order = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    bound, before, kept = top_p * sum(weights), 0.0, set()
    for token in order:
        if before >= bound:
            break
        kept.add(token)
        before += weights[token]
    return {token for token in kept if weights[token] > 0.0}


@settings(max_examples=100, deadline=None)
@given(
    count=st.integers(1, 6),
    columns=st.sampled_from([1, 2, 30, 700]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 8.0, 200.0]),
    top_p=st.lists(st.sampled_from([0.999999, 0.9, 0.5, 0.1, 1e-9, 1e-300]), min_size=6, max_size=6),
    seed=st.integers(0, 2**31),
)
def test_equals_sorting(count: int, columns: int, spread: float, top_p: list[float], seed: int) -> None:
    """Flat rows, rows of one token and of a few hundred; weights that are zero."""
    logits = torch.randn(count, columns, generator=torch.Generator().manual_seed(seed)) * spread
    weights = (logits - logits.max(-1, keepdim=True).values).exp_()
    expected = [sorted_nucleus(row, p) for row, p in zip(weights.tolist(), top_p, strict=False)]
    before = weights.clone()
    keep_nucleus(weights, torch.tensor(top_p[:count], dtype=torch.float64).unsqueeze(1))
    assert [set(row.nonzero().flatten().tolist()) for row in weights] == expected
    assert torch.equal(weights[weights > 0], before[weights > 0])


@pytest.mark.parametrize("top_p", [0.9, 0.3])
def test_a_row_alone_is_the_row_in_company(top_p: float) -> None:
    weights = (torch.randn(32, 5000, generator=torch.Generator().manual_seed(3)) * 2).sub_(12).exp_().clamp_(max=1.0)
    together = weights.clone()
    keep_nucleus(together, torch.full((32, 1), top_p, dtype=torch.float64))
    for row in range(32):
        alone = weights[row : row + 1].clone()
        keep_nucleus(alone, torch.full((1, 1), top_p, dtype=torch.float64))
        assert torch.equal(alone[0], together[row])
