"""Log probabilities of whole answers: nothing is lost in packing, and many of them take little memory."""

import gc
import json
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer_service.engines.messages import FinishReason, Usage
from tokenizer_service.http.chat import ChatAnswer
from tokenizer_service.http.completions import CompletionAnswer, CompletionOptions
from tokenizer_service.http.facts import AnswerFacts
from tokenizer_service.http.logprob_shapes import CompletionLogprobs, chat_content, written_content
from tokenizer_service.http.packed_logprobs import PackedLogprobs
from tokenizer_service.sessions.events import Completed, TextDelta, TextLogprob, TextPositionLogprobs

TEXTS = [b"a", b" b", b"\xf0", b"\x9f\x8c", "\u00e9".encode(), b'"', b"a"]
ITEMS = st.builds(
    lambda token, logprob: TextLogprob(token, TEXTS[token], logprob),
    st.integers(0, len(TEXTS) - 1),
    st.floats(-100, 0),
)
POSITIONS = st.builds(
    TextPositionLogprobs, st.none() | ITEMS, st.integers(0, 2**40), st.lists(ITEMS, max_size=4).map(tuple)
)
FACTS = AnswerFacts("id", 1, "m", with_logprobs=True)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(POSITIONS, max_size=40), max_size=6))
def test_what_is_packed_comes_out_and_is_written_as_it_was(parts: list[list[TextPositionLogprobs]]) -> None:
    packed = PackedLogprobs()
    for part in parts:
        packed.extend(part)
    whole = [position for part in parts for position in part]
    assert (list(packed), len(packed)) == (whole, len(whole))
    assert json.loads(written_content(packed)) == {"content": chat_content(whole), "refusal": None}
    assert json.loads(CompletionLogprobs("x").written(packed)) == CompletionLogprobs("x").add(whole)


def deltas(count: int) -> Iterator[TextDelta | Completed]:
    for place in range(count):
        items = [TextLogprob(1000 + other, f" word{other}".encode(), -place - other / 7) for other in range(20)]
        yield TextDelta(" word0", (1000,), 0, (TextPositionLogprobs(items[0], 1, tuple(items)),))
    yield Completed(FinishReason.LENGTH, Usage(1, count, 0), None, None, 1)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_an_answer_of_many_takes_little_memory(kind: str) -> None:
    """Under 40 bytes for each while it grows, and a few times its JSON while it is written."""
    answer = ChatAnswer(FACTS) if kind == "chat" else CompletionAnswer(FACTS, CompletionOptions())
    gc.collect()
    tracemalloc.start()
    try:
        for event in deltas(1500):
            answer.add(0, event)
        grown = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        body = answer.body()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert grown < 40 * 1500 * 21, grown
    assert peak < grown + 5 * len(body), (peak, len(body))
    assert len(body) > 800_000
