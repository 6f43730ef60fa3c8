"""Prompts have exactly the length that was asked for, whatever the seed, and are new for every seed."""

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer

from benchmarks.serving.rounds import DEFAULT_REQUESTS, Settings, counts_of, workload
from benchmarks.serving.workload import Shape, WordList, make_workload
from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(resolve_model_folder(DEFAULT_MODEL) / "tokenizer.json"))


@pytest.fixture(scope="module")
def words(tokenizer: Tokenizer) -> WordList:
    return WordList.of(tokenizer)


@pytest.mark.parametrize("length", [1, 7, 100, 1000])
def test_text_and_ids_are_the_same_prompt(words: WordList, tokenizer: Tokenizer, length: int) -> None:
    for request in make_workload(words, Shape(length, 5), 8, seed=3):
        assert len(request.token_ids) == length
        assert tuple(tokenizer.encode(request.text, add_special_tokens=False).ids) == request.token_ids
        assert request.max_tokens == 5


def test_the_same_seed_gives_the_same_requests_and_another_gives_others(words: WordList) -> None:
    first, again, other = (make_workload(words, Shape(50, 8), 20, seed) for seed in (1, 1, 2))
    assert first == again
    prompts = {request.token_ids[:4] for request in first + other}
    assert len(prompts) == 40  # nor is a beginning met twice


def test_spread_lengths_stay_in_their_range_and_differ(words: WordList) -> None:
    requests = make_workload(words, Shape(100, 40, spread=0.5), 200, seed=0)
    lengths = [len(request.token_ids) for request in requests]
    outputs = [request.max_tokens for request in requests]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert min(outputs) >= 20
    assert max(outputs) <= 60
    assert len(set(lengths)) > 30


@pytest.mark.parametrize(
    "make",
    [
        lambda: Shape(0, 1),
        lambda: Shape(1, 0),
        lambda: Shape(1, 1, spread=1.0),
        lambda: Shape(1, 1, spread=-0.1),
        lambda: WordList([]),
        lambda: Settings(0, (1,), {}, Shape(), 0),
        lambda: Settings(1, (), {}, Shape(), 0),
        lambda: Settings(1, (1, 0), {}, Shape(), 0),
        lambda: Settings(1, (8,), {8: 7}, Shape(), 0),
        lambda: counts_of(["8"]),
        lambda: counts_of(["8:x"]),
        lambda: counts_of([":4"]),
    ],
)
def test_what_cannot_be_is_refused(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (each says it in its own words)
        make()


def test_every_round_and_concurrency_has_new_prompts(words: WordList) -> None:
    settings = Settings(3, (1, 8), {1: 2}, Shape(20, 4), seed=5)
    sets = [workload(settings, words, number, level) for number in range(3) for level in settings.concurrency]
    assert [len(requests) for requests in sets] == [2, DEFAULT_REQUESTS[8]] * 3
    prompts = [request.token_ids for requests in sets for request in requests]
    assert len(set(prompts)) == len(prompts)
