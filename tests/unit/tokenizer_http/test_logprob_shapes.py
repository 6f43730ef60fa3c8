"""Log probabilities as completions show them."""

from tokenizer_service.http.logprob_shapes import CompletionLogprobs
from tokenizer_service.sessions.events import TextLogprob, TextPositionLogprobs

PARTS = tuple(TextLogprob(n, bytes((0x80 + n,)), -float(n)) for n in range(3))


def test_the_token_itself_is_among_the_top_whatever_its_rank() -> None:
    token, other = TextLogprob(7, b"b", -3.0), TextLogprob(8, b"a", -0.5)
    made = CompletionLogprobs().add([TextPositionLogprobs(token, 4, (other,)), TextPositionLogprobs(token, 4, ())])
    assert made["top_logprobs"] == [{"a": -0.5, "b": -3.0}, {"b": -3.0}]


def test_of_tokens_with_one_text_the_most_likely_is_shown() -> None:
    """Parts of characters all look alike."""
    made = CompletionLogprobs().add([TextPositionLogprobs(PARTS[2], 3, PARTS[:2])])
    assert made["top_logprobs"] == [{"\ufffd": 0.0}]
