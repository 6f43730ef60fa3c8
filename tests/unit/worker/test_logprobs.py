"""Log probabilities of rows: numbers, order among equal ones, ranks, independence of company."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.worker.logprobs import logprob_rows
from tests.fixtures.reference_sampling import logprobs_of


def rows_of(logits: torch.Tensor, tokens: list[int], wanted: list[int], rows: list[int] | None = None) -> tuple:
    places = torch.arange(len(tokens)) if rows is None else torch.tensor(rows)
    return logprob_rows(logits, places, torch.tensor(tokens), np.array(wanted)).entries()


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([2, 21, 84, 85, 300, 3000]),
    count=st.integers(1, 40),
    spread=st.sampled_from([0.0, 0.05, 4.0]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31),
)
def test_equals_a_full_sort(vocab: int, count: int, spread: float, dtype: torch.dtype, seed: int) -> None:
    """B092: any mix of 0, 1 and 20; flat rows and bfloat16 are full of ties."""
    generator = torch.Generator().manual_seed(seed)
    logits = (torch.randn(count, vocab, generator=generator) * spread).to(dtype)
    tokens = torch.randint(vocab, (count,), generator=generator).tolist()
    wanted = [(0, 1, 20)[i % 3] for i in range(count)]
    exact = torch.log_softmax(logits.float(), dim=-1).tolist()
    entries = rows_of(logits, tokens, wanted)
    assert len(entries) == count
    for entry, token, number, row, model_row in zip(entries, tokens, wanted, exact, logits.tolist(), strict=True):
        order = sorted(range(vocab), key=lambda one: (-row[one], one))
        assert entry.token == (token, row[token])
        assert entry.rank == 1 + sum(value > row[token] for value in row)
        assert entry.top == tuple((one, row[one]) for one in order[:number])
        assert row == pytest.approx(logprobs_of(model_row), abs=1e-5)


def test_a_row_alone_is_the_row_in_company() -> None:
    logits = torch.randn(70, 5000, generator=torch.Generator().manual_seed(2)) * 3
    tokens = list(range(0, 7000, 100))
    tokens = [token % 5000 for token in tokens]
    together = rows_of(logits, tokens, [20] * 70)
    for place in range(70):
        alone = rows_of(logits[place : place + 1], [tokens[place]], [20])
        assert alone == (together[place],)


def test_only_the_named_rows_are_taken() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(4))
    entries = rows_of(logits, [7, 8], [2, 0], rows=[1, 4])
    assert entries == (rows_of(logits[1:2], [7], [2])[0], rows_of(logits[4:5], [8], [0])[0])
