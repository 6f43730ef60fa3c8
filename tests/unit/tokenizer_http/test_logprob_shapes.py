"""Log probabilities as completions show them."""

from tokenizer_service.http.logprob_shapes import CompletionLogprobs
from tokenizer_service.sessions.events import TextLogprob, TextPositionLogprobs

PARTS = tuple(TextLogprob(n, bytes((0x80 + n,)), -float(n)) for n in range(3))


def test_the_token_itself_is_among_the_top_whatever_its_rank() -> None:
    token, other = TextLogprob(7, b"b", -3.0), TextLogprob(8, b"a", -0.5)
    made = CompletionLogprobs().add([TextPositionLogprobs(token, 4, (other,)), TextPositionLogprobs(token, 4, ())])
    assert made["top_logprobs"] == [{"a": -0.5, "b": -3.0}, {"b": -3.0}]


def test_parts_of_characters_are_told_apart_by_their_bytes() -> None:
    """B092: none hides another; tokens and offsets fit."""
    made = CompletionLogprobs().add([TextPositionLogprobs(PARTS[2], 3, PARTS[:2])])
    assert made["tokens"] == ["bytes:\\x82"]
    assert made["top_logprobs"] == [{"bytes:\\x80": 0.0, "bytes:\\x81": -1.0, "bytes:\\x82": -2.0}]


def test_of_tokens_with_one_text_the_one_that_came_is_shown() -> None:
    """B092: else the most likely."""
    twins = tuple(TextLogprob(n, b"a", -float(n)) for n in (1, 2, 3))
    made = CompletionLogprobs().add([TextPositionLogprobs(twins[2], 3, twins[:2])])
    assert (made["token_logprobs"], made["top_logprobs"]) == ([-3.0], [{"a": -3.0}])
    other = TextLogprob(7, b"b", -9.0)
    made = CompletionLogprobs().add([TextPositionLogprobs(other, 9, twins)])
    assert made["top_logprobs"] == [{"a": -1.0, "b": -9.0}]
