"""Edited rows against the slow reference: every rule alone and together, any company, any history."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_service.core.sampling import SamplingParams
from engine_service.worker.logit_editor import LogitEditor
from engine_service.worker.philox import uniforms
from engine_service.worker.row_rules import make_row_rules
from engine_service.worker.sampled import Sampled
from engine_service.worker.sampler import Sampler
from engine_service.worker.sampling_rows import LogitEdits, RuledRow, SamplingRows, TokenMasks
from tests.fixtures.reference_sampling import edit_logits, sample_one

CPU = torch.device("cpu")
VOCAB = 40
ROW_LENGTH = 64
OFF = SamplingParams(max_tokens=1, seed=0)
TOKEN = st.integers(0, VOCAB - 1)

PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.just(1),
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    top_k=st.sampled_from([0, 0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.9]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.5, 0.5, 2.0, 1e-20]),
    presence_penalty=st.sampled_from([0.0, 0.7, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.1]),
    logit_bias=st.dictionaries(TOKEN, st.floats(-100, 100, width=32), max_size=5).map(
        lambda d: tuple(sorted(d.items()))
    ),
    allowed_token_ids=st.one_of(st.none(), st.none(), st.frozensets(TOKEN, min_size=1, max_size=12)),
    banned_token_ids=st.frozensets(TOKEN, max_size=6),
    bad_words=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4).map(tuple), max_size=5).map(tuple),
)
# Few different tokens, so that histories repeat and words are completed.
HISTORY = st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.lists(st.integers(0, 5), max_size=20))
Row = tuple[SamplingParams, tuple[list[int], list[int]]]


def rows_of(rows: list[Row], **changes: object) -> SamplingRows:
    tokens = torch.full((len(rows) * ROW_LENGTH,), 7, dtype=torch.int32)
    ruled = []
    for place, (params, (prompt, completion)) in enumerate(rows):
        begin, length = place * ROW_LENGTH, len(prompt) + len(completion)
        tokens[begin : begin + length] = torch.tensor([*prompt, *completion], dtype=torch.int32)
        rules = make_row_rules(params, len(prompt), VOCAB, CPU)
        if rules is not None:
            ruled.append(RuledRow(place, rules, begin, length))
    positions = np.array([len(prompt) + len(completion) for _, (prompt, completion) in rows])
    made = SamplingRows(
        temperature=np.array([params.temperature for params, _ in rows], dtype=np.float32),
        top_k=np.array([params.top_k for params, _ in rows], dtype=np.int64),
        top_p=np.array([params.top_p for params, _ in rows], dtype=np.float64),
        min_p=np.array([params.min_p for params, _ in rows], dtype=np.float32),
        uniforms=uniforms(np.array([params.seed for params, _ in rows]), positions),
        edits=LogitEdits(tuple(ruled), tokens) if ruled else None,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def reference(rows: list[Row], logits: torch.Tensor) -> list[int | None]:
    """The token of each row; None where nothing is left."""
    tokens: list[int | None] = []
    for (params, (prompt, completion)), row in zip(rows, logits.tolist(), strict=True):
        edited = edit_logits(row, params, prompt, completion)
        is_empty = max(edited) == float("-inf")
        tokens.append(None if is_empty else sample_one(edited, params, len(prompt) + len(completion)))
    return tokens


def tokens_of(sampled: Sampled) -> list[int | None]:
    assert sampled.sound.all()
    left = torch.ones_like(sampled.sound) if sampled.has_choice is None else sampled.has_choice
    return [
        token if is_left else None for token, is_left in zip(sampled.token_ids.tolist(), left.tolist(), strict=True)
    ]


def random_logits(count: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3).to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(PARAMS, HISTORY), min_size=1, max_size=40),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_equals_the_slow_reference(rows: list[Row], seed: int, dtype: torch.dtype) -> None:
    """B076, B077, B083, B087, B090."""
    logits = random_logits(len(rows), seed, dtype)
    before = logits.clone()
    assert tokens_of(Sampler(VOCAB, CPU).sample(logits, rows_of(rows))) == reference(rows, logits)
    assert torch.equal(logits, before), "log probabilities are taken of the model's own logits"


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.tuples(PARAMS, HISTORY), min_size=1, max_size=8), seed=st.integers(0, 2**31))
def test_edited_logits_are_the_references_to_the_bit(rows: list[Row], seed: int) -> None:
    """Twice with one editor: its counts are zero again."""
    logits = random_logits(len(rows), seed)
    expected = [
        edit_logits(row, params, *history) for (params, history), row in zip(rows, logits.tolist(), strict=True)
    ]
    editor = LogitEditor(VOCAB, CPU)
    for _ in range(2):
        edited = logits.clone()
        editor.edit(edited, np.arange(len(rows)), rows_of(rows))
        assert edited.tolist() == expected


def test_neighbours_change_nothing() -> None:
    """Every row alone, and among rows with and without rules in any order, gives the same token."""
    draw = random.Random(4)
    settings_list = [
        OFF,
        replace(OFF, temperature=0.0),
        replace(OFF, repetition_penalty=1.7),
        replace(OFF, frequency_penalty=0.6, presence_penalty=0.4, top_k=5),
        replace(OFF, temperature=0.0, banned_token_ids=frozenset(range(0, VOCAB, 2))),
        replace(OFF, bad_words=((1, 2), (3,)), logit_bias=((1, 3.0), (2, 3.0))),
        replace(OFF, top_p=0.8, allowed_token_ids=frozenset(range(6))),
    ]
    rows: list[Row] = [
        (
            replace(draw.choice(settings_list), seed=draw.getrandbits(60)),
            (draw.choices(range(6), k=draw.randint(1, 30)), draw.choices(range(6), k=draw.randint(0, 30))),
        )
        for _ in range(75)
    ]
    logits = random_logits(75, 9)
    sampler = Sampler(VOCAB, CPU)
    alone = [tokens_of(sampler.sample(logits[i : i + 1], rows_of([rows[i]])))[0] for i in range(75)]
    order = draw.sample(range(75), 75)
    together = tokens_of(sampler.sample(logits[order], rows_of([rows[i] for i in order])))
    assert together == [alone[i] for i in order]


def test_a_row_with_nothing_left_harms_no_other() -> None:
    words = ((3, 3), (3,))
    rows: list[Row] = [
        (OFF, ([1], [2])),
        (replace(OFF, allowed_token_ids=frozenset({3}), bad_words=words), ([1], [3])),
        (replace(OFF, temperature=0.0), ([1], [])),
    ]
    logits = random_logits(3, 1)
    sampled = Sampler(VOCAB, CPU).sample(logits, rows_of(rows))
    assert tokens_of(sampled)[1] is None
    assert tokens_of(sampled) == reference(rows, logits)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_unsound_logits_of_an_edited_row_are_reported(bad: float) -> None:
    logits = random_logits(2, 3)
    logits[1, 5] = bad
    params = replace(OFF, banned_token_ids=frozenset({5}), frequency_penalty=1.0)
    sampled = Sampler(VOCAB, CPU).sample(logits, rows_of([(params, ([5], [5])), (params, ([5], [5]))]))
    assert sampled.sound.tolist() == [True, False]


def test_the_smallest_repetition_penalty_makes_nothing_infinite() -> None:
    """B087."""
    params = replace(OFF, temperature=0.0, repetition_penalty=1e-300)
    sampled = Sampler(VOCAB, CPU).sample(torch.full((1, VOCAB), 30.0), rows_of([(params, ([5], []))]))
    assert (sampled.token_ids.tolist(), tokens_of(sampled)) == ([5], [5])


def mask_bits(allowed: list[set[int]]) -> torch.Tensor:
    words = [[sum(1 << (t % 32) for t in one if t // 32 == word) for word in range(2)] for one in allowed]
    return torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))


def test_masks_exclude_before_penalties_and_only_their_rows() -> None:
    """The sign bit of a word counts like any other."""
    rows: list[Row] = [(replace(OFF, temperature=0.0, frequency_penalty=0.5), ([1], [4, 31])) for _ in range(4)]
    logits = random_logits(4, 12)
    masks = TokenMasks(np.array([1, 3]), mask_bits([{31, 39}, {0, 4}]))
    got = tokens_of(Sampler(VOCAB, CPU).sample(logits, rows_of(rows, masks=masks)))
    for place, allowed in ((1, {31, 39}), (3, {0, 4})):
        params = replace(rows[place][0], allowed_token_ids=frozenset(allowed))
        rows[place] = (params, rows[place][1])
    assert got == reference(rows, logits)


def test_min_tokens_yields_to_a_mask_that_leaves_only_the_end() -> None:
    rows: list[Row] = [(replace(OFF, temperature=0.0), ([1], [])) for _ in range(3)]
    suppressed = np.array([[0, 1, 2], [2, 2, 2]])
    masks = TokenMasks(np.array([0, 1]), mask_bits([{2}, {2, 9}]))
    logits = torch.zeros(3, VOCAB)
    logits[:, 2] = 5.0
    got = tokens_of(Sampler(VOCAB, CPU).sample(logits, rows_of(rows, masks=masks, suppressed=suppressed)))
    assert got == [2, 9, 0]
