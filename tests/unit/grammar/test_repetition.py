"""Nested repeat counts: every count inside another multiplies, those side by side do not."""

import pytest

from engine_service.grammar.repetition import nested_repeats, nested_repeats_of_grammar


@pytest.mark.parametrize(
    ("pattern", "count"),
    [
        ("", 1),
        ("abc*d+", 1),
        ("a{7}", 7),
        ("a{2,7}", 7),
        ("a{2,}", 2),
        ("a{,9}", 9),
        ("a{3}b{4}c{5}", 5),
        ("(a{3}b{4}){5}", 20),
        ("((a{10}){10}){10}", 1000),
        ("(a{10})b{10}", 10),
        ("(a{10}){10}|(b{3}){40}", 120),
        ("(a{10}){2}{3}", 60),
        ("x(y(a{10}b){2}c){3}{2}", 120),
        (r"\(a{10}\){10}", 10),
        (r"[(]a{10}[)]{10}", 10),
        ("[{10}]{5}", 5),
        ("[]{10}]{5}", 5),
        ("(?:a{10}){10}", 100),
        ("(a{10}", 10),
        ("a{10}){10}){10}", 1000),
        ("a{99999999999999999999}", 999_999_999_999),
        ("a{0}", 1),
        ("a{x}", 1),
    ],
)
def test_counts(pattern: str, count: int) -> None:
    assert nested_repeats(pattern) == count


def test_rules_of_a_grammar_multiply() -> None:
    assert nested_repeats_of_grammar('start: a{10}\na: b{20} b{3}\nb: "x"') == 200


def test_quotes_hide_nothing() -> None:
    """A quote may open a string or stand in a regular expression."""
    assert nested_repeats_of_grammar('start: /"(a{50})"{3}/') >= 50
    assert nested_repeats_of_grammar('start: (a{100} "(" ){100}') == 10_000
