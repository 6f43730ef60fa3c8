"""Rows whose logits are not numbers, or exclude every token, beside sound ones: only they get no token."""

import numpy as np
import pytest
import torch

from engine_service.worker.sampler import Sampler, _draw_from_top, _Settings
from engine_service.worker.sampling_rows import SamplingRows, TokenMasks

VOCAB = 512


def rows(top_k: int, top_p: float, masks: TokenMasks | None = None) -> SamplingRows:
    return SamplingRows(
        np.ones(4, np.float32), np.full(4, top_k, np.int64), np.full(4, top_p), np.zeros(4, np.float32),
        np.linspace(0.1, 0.9, 4), masks=masks,
    )  # fmt: skip


@pytest.mark.parametrize("top_k", [0, 20])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_neighbours_of_an_unsound_row_get_their_tokens(top_k: int, top_p: float, bad: float) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    sampler = Sampler(VOCAB, torch.device("cpu"))
    expected = sampler.sample(logits, rows(top_k, top_p)).token_ids
    broken = logits.clone()
    broken[1, 3] = bad
    broken[2] = bad
    sampled = sampler.sample(broken, rows(top_k, top_p))
    assert sampled.sound.tolist() == [True, False, False, True]
    assert sampled.token_ids.tolist() == [expected[0], 0, 0, expected[3]]


@pytest.mark.parametrize("top_k", [0, 20])
@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_mask_of_nothing_leaves_its_row_without_a_choice(top_k: int, top_p: float) -> None:
    """Also beside an unsound row that is masked."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    bits = torch.full((3, VOCAB // 32), -1, dtype=torch.int32)
    bits[1] = 0
    masks = TokenMasks(np.array([0, 1, 2]), bits)
    sampler = Sampler(VOCAB, torch.device("cpu"))
    expected = sampler.sample(logits, rows(top_k, top_p)).token_ids
    logits[2, 5] = float("nan")
    sampled = sampler.sample(logits, rows(top_k, top_p, masks))
    assert sampled.has_choice is not None
    assert (sampled.sound & sampled.has_choice).tolist() == [True, False, False, True]
    assert sampled.token_ids.tolist() == [expected[0], 0, 0, expected[3]]


@pytest.mark.parametrize("top_p", [1.0, 0.8])
@pytest.mark.parametrize("left", [1, 3, 19, 63])
def test_a_row_with_fewer_tokens_left_than_top_k_needs_no_order_of_all(left: int, top_p: float) -> None:
    """Sorting a whole vocabulary for each row of a grammar would take most of a step."""
    logits = torch.full((1, VOCAB), -float("inf"))
    places = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(left))[:left]
    logits[0, places] = torch.randn(left, generator=torch.Generator().manual_seed(3))
    largest = logits.max(dim=1).values
    for uniform in np.linspace(0.0, 0.999, 40):
        columns = (torch.tensor([[value]]) for value in (0.7, 20, top_p, 0.0, uniform))
        settings = _Settings(*columns)
        short, is_enough = _draw_from_top(logits, largest, settings, 64)
        whole, _ = _draw_from_top(logits, largest, settings, VOCAB)
        assert bool(is_enough)
        assert short.tolist() == whole.tolist()
