"""Requests of a load test: lengths, prefixes, tenants, cancellations, and that they are a function of the seed."""

import random
import statistics
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from service_runtime.model_files import DEFAULT_MODEL, resolve_model_folder
from tokenwire_client.load.lengths import Fixed, LogNormal, Uniform, parse_lengths
from tokenwire_client.load.words import WORDS, text_of
from tokenwire_client.load.workload import Shape, TraceEntry, Workload


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("100", Fixed(100)),
        ("fixed:7", Fixed(7)),
        ("uniform:5,9", Uniform(5, 9)),
        ("lognormal:200,0.5", LogNormal(200, 0.5)),
        ("lognormal:200,0.5,800", LogNormal(200, 0.5, 800)),
    ],
)
def test_lengths_as_written(text: str, wanted: object) -> None:
    assert parse_lengths(text) == wanted


@pytest.mark.parametrize("text", ["", "0", "-3", "1.5", "uniform:5", "uniform:9,5", "lognormal:0,1", "normal:1,2", "x"])
def test_what_is_no_length_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is none of|outside|is empty"):
        parse_lengths(text)


def test_drawn_lengths_have_their_distribution() -> None:
    source = random.Random(5)
    uniform = [Uniform(10, 20).draw(source) for _ in range(5000)]
    assert set(uniform) == set(range(10, 21))
    drawn = [LogNormal(200, 0.5, 800).draw(source) for _ in range(5000)]
    assert statistics.median(drawn) == pytest.approx(200, rel=0.05)
    assert 1 <= min(drawn) <= max(drawn) <= 800


def test_words_are_one_token_each_in_the_default_model() -> None:
    tokenizer = Tokenizer.from_file(str(resolve_model_folder(DEFAULT_MODEL) / "tokenizer.json"))
    longer = [word for word in WORDS if len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) != 1]
    assert longer == []
    assert len(set(WORDS)) == len(WORDS) > 500
    assert len(tokenizer.encode(text_of(300, random.Random(1)), add_special_tokens=False).ids) == 300


@given(st.integers(0, 10**6), st.integers(0, 50))
def test_a_request_is_a_function_of_seed_and_number(seed: int, number: int) -> None:
    shape = Shape(Uniform(1, 40), Uniform(2, 40), prefixes=3, prefix_tokens=5, cancel_share=0.5)
    request = Workload(shape, seed).request(number)
    assert request == Workload(shape, seed).request(number)
    assert len(request.text.split()) == request.prompt_tokens
    assert request.cancel_after is None or 1 <= request.cancel_after <= request.max_tokens - 1


def test_prompts_share_prefixes_and_nothing_else() -> None:
    workload = Workload(Shape(Fixed(10), prefixes=4, prefix_tokens=20), 1)
    texts = [workload.request(number).text.split() for number in range(200)]
    assert len({tuple(text[:20]) for text in texts}) == 4
    assert len({tuple(text[20:]) for text in texts}) == 200


def test_tenants_get_their_part() -> None:
    workload = Workload(Shape(tenant_weights=(3.0, 1.0)), 1)
    counts = Counter(workload.request(number).tenant for number in range(4000))
    assert counts[0] / 4000 == pytest.approx(0.75, abs=0.03)
    assert set(counts) == {0, 1}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_so_many_are_left_early(share: float) -> None:
    workload = Workload(Shape(cancel_share=share), 1)
    left = sum(workload.request(number).cancel_after is not None for number in range(3000))
    assert left / 3000 == pytest.approx(share, abs=0.03)


def test_equal_block_ids_are_equal_text() -> None:
    entries = [TraceEntry(0.0, 1030, 5, (7, 8, 9)), TraceEntry(1.0, 1100, 5, (7, 8, 10))]
    first, second = (Workload(Shape(), 1, entries).request(number).text.split() for number in range(2))
    assert (len(first), len(second)) == (1030, 1100)
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1030]


def test_recorded_requests_come_again_and_are_cut_to_the_limits() -> None:
    entries = [TraceEntry(0.0, 50, 5), TraceEntry(1.0, 10, 90), TraceEntry(2.0, 3, 4, text="as recorded")]
    entries.append(TraceEntry(3.0, 25, 4, text="four" * 25))
    workload = Workload(Shape(most_input=20, most_output=30), 1, entries)
    lengths = [(len(r.text.split()), r.max_tokens) for r in map(workload.request, (0, 1, 2, 4))]
    assert lengths == [(20, 5), (10, 30), (2, 4), (20, 5)]
    assert workload.request(3).text == "four" * 20
    assert [workload.clipped(sent) for sent in (1, 3, 100)] == [1, 2, 3]


@pytest.mark.parametrize(
    "fields",
    [{"prefixes": 2}, {"prefix_tokens": 2}, {"cancel_share": 1.5}, {"tenant_weights": ()}, {"tenant_weights": (0.0,)}],
)
def test_what_is_no_shape_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"need both|outside|must be in"):
        Shape(**fields)  # type: ignore[arg-type]
