"""The cache of grammars stays within both bounds and forgets the least recently used first."""

from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.sampling import ConstraintKind, StructuredOutput
from engine_service.grammar.cache import GrammarCache


def constraint(text: str) -> StructuredOutput:
    return StructuredOutput(ConstraintKind.REGEX, text)


@given(st.lists(st.tuples(st.booleans(), st.text("ab", max_size=6)), max_size=80))
def test_it_equals_a_slow_model(moves: list[tuple[bool, str]]) -> None:
    cache = GrammarCache[str](max_entries=5, max_characters=16)
    model: list[str] = []
    for is_put, text in moves:
        if is_put:
            cache.put(constraint(text), text.upper())
            model = [kept for kept in model if kept != text] + [text]
            while len(model) > 5 or sum(map(len, model)) > 16:
                model.pop(0)
        else:
            assert cache.get(constraint(text)) == (text.upper() if text in model else None)
            if text in model:
                model.append(model.pop(model.index(text)))
        assert (len(cache), cache.characters) == (len(model), sum(map(len, model)))


def test_kinds_are_kept_apart_and_the_grammar_is_no_part_of_the_key() -> None:
    cache = GrammarCache[int](9, 99)
    cache.put(constraint("a"), 1)
    assert cache.get(StructuredOutput(ConstraintKind.CHOICE, "a")) is None
    assert cache.get(StructuredOutput(ConstraintKind.REGEX, "a", compiled=object())) == 1
