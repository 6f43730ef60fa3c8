"""Sessions of several samples, log probabilities and tool calls, without sockets."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tokenizer_sessions.session_parts import (
    FACTS,
    Read,
    finished,
    letter,
    news,
    read_all,
    started,
)
from tokenizer_service.engines.messages import FinishReason, PositionLogprobs, TokenNews, Usage, sample_seed
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.sessions.events import (
    Completed,
    TextDelta,
    TextLogprob,
    TextPositionLogprobs,
    ToolCallDelta,
)
from tokenizer_service.sessions.sample import PROMPT_POSITIONS_PER_DELTA
from tokenizer_service.sessions.session import ReadLimits

LOST = Refusal(RefusalCode.UNAVAILABLE, "lost")


def position(token_id: int, alternatives: int = 1) -> PositionLogprobs:
    return PositionLogprobs(
        (token_id, -0.5 * token_id), token_id + 1, tuple((t, -1.0 * t) for t in range(alternatives))
    )


def shown(token_id: int, alternatives: int = 1) -> TextPositionLogprobs:
    own = TextLogprob(token_id, letter(token_id), -0.5 * token_id)
    return TextPositionLogprobs(
        own, token_id + 1, tuple(TextLogprob(t, letter(t), -1.0 * t) for t in range(alternatives))
    )


async def test_samples_end_one_by_one_and_the_session_with_the_last() -> None:
    session, engine, watcher = started(parsers=[None] * 3)
    session.on_news(news([0], index=2))
    session.on_news(news([1], finished(count=1), index=0))
    session.on_news(news([2, 3], index=2))
    assert engine.calls == []
    session.on_news(news([4], finished(count=3, cached=1), index=2))
    session.on_news(news([], finished(FinishReason.STOP, 0, 2), index=1))
    assert engine.calls == ["close"]
    samples, failed = await read_all(session)
    assert failed is None
    assert {index: (read.text, read.token_ids) for index, read in samples.items()} == {
        0: ("b", [1]),
        1: ("", []),
        2: ("acde", [0, 2, 3, 4]),
    }
    assert samples[0].end == Completed(FinishReason.LENGTH, Usage(3, 1, 0), None, None, 9, 0)
    assert samples[1].end == Completed(FinishReason.STOP, Usage(3, 0, 0), None, None, 10, 1)
    assert samples[2].end == Completed(FinishReason.LENGTH, Usage(3, 3, 1), None, None, 11, 2)
    assert watcher.tokens == {0: 1, 2: 4}


async def test_a_stop_string_ends_its_own_sample_only() -> None:
    session, engine, watcher = started("bc", parsers=[None] * 2)
    session.on_news(news([0, 1, 2, 3], index=1))
    assert engine.calls == ["cancel 1"]
    session.on_news(news([0, 3], index=0))
    session.on_news(news([4], finished(FinishReason.ABORT, 5, cached=2), index=1))
    session.on_news(news([1], finished(count=3), index=0))
    samples, failed = await read_all(session)
    assert failed is None
    assert (samples[0].text, samples[0].token_ids) == ("adb", [0, 3, 1])
    assert (samples[1].text, samples[1].token_ids) == ("a", [0, 1, 2])
    assert samples[1].end == Completed(FinishReason.STOP, Usage(3, 3, 2), "bc", None, 10, 1)
    assert samples[0].end == Completed(FinishReason.LENGTH, Usage(3, 3, 0), None, None, 9, 0)
    assert (engine.calls[:2], watcher.stops) == (["cancel 1", "close"], 1)


async def test_a_lost_engine_fails_only_what_had_not_stopped() -> None:
    session, _, _ = started("b", parsers=[None] * 2)
    session.on_news(news([0, 1], index=1))
    session.on_news(news([0], index=0))
    session.on_lost(LOST)
    samples, failed = await read_all(session)
    assert failed is not None
    assert failed.refusal is LOST
    assert samples[0].text == "a"
    assert samples[0].end is None
    assert samples[1].end == Completed(FinishReason.STOP, Usage(3, 2, 0), "b", None, 10, 1)


async def test_one_failing_sample_fails_the_request_once() -> None:
    session, engine, _ = started(parsers=[None] * 2)
    refused = replace(finished(FinishReason.ERROR), refusal=LOST)
    session.on_news(news([0], finished(count=1), index=1))
    session.on_news(news([], refused, index=0))
    session.on_news(news([], refused, index=1))
    samples, failed = await read_all(session)
    assert failed is not None
    assert failed.refusal is LOST
    assert samples[1].end is not None  # it had ended well, and its reader knows
    assert engine.calls == ["close", "close"]


async def test_the_unread_of_all_samples_is_bounded_together() -> None:
    session, engine, _ = started(parsers=[None] * 3)
    for index in range(3):
        session.on_news(news([0] * 3, index=index))
    assert engine.calls == []
    assert await session.next_event() == TextDelta("aaa", (0, 0, 0), 0)
    session.on_news(news([0] * 4, index=0))  # 10 unread: the limit
    assert engine.calls == []
    session.on_news(news([0], index=2))
    samples, failed = await read_all(session)
    assert samples == {}
    assert failed is not None
    assert failed.refusal.code is RefusalCode.RESOURCE_EXHAUSTED
    assert "11 tokens" in failed.refusal.message
    assert engine.calls[0] == "close"


async def test_reported_alternatives_count_as_unread() -> None:
    session, engine, _ = started()
    session.on_news(TokenNews(0, [1], None, [position(1, 9)]))
    assert engine.calls == []
    session.on_news(TokenNews(0, [1], None, [position(1, 0)]))
    assert engine.calls == ["close"]


async def test_an_ended_sample_that_was_cut_is_not_shown_as_whole() -> None:
    session, _, _ = started(parsers=[None] * 2)
    session.on_news(news([0] * 8, finished(count=8), index=0))
    session.on_news(news([0] * 8, index=1))
    samples, failed = await read_all(session)
    assert samples == {}
    assert failed is not None


async def test_tokens_and_log_probabilities_are_held_back_with_their_text() -> None:
    """B030: one token at a time, and what was held comes with the text that it completes."""
    session, _, _ = started("bcd")
    for token in (0, 1, 2):
        session.on_news(TokenNews(0, [token], None, [position(token)]))
    assert await session.next_event() == TextDelta("a", (0,), 0, (shown(0),))
    session.on_news(TokenNews(0, [1], None, [position(1)]))  # "bc" was no beginning of the stop; "b" is again one
    assert await session.next_event() == TextDelta("bc", (1, 2), 0, (shown(1), shown(2)))
    session.on_news(TokenNews(0, [2], None, [position(2)]))
    session.on_news(TokenNews(0, [3, 4], None, [position(3), position(4)]))
    end = TextDelta("", (1, 2, 3), 0, (shown(1), shown(2), shown(3)))  # 4 came after the match
    assert await session.next_event() == end


async def test_what_is_held_at_the_end_comes_with_the_last_text() -> None:
    """B030."""
    session, _, _ = started("bcd")
    session.on_news(TokenNews(0, [0, 1, 2], None, [position(0), position(1), position(2)]))
    assert await session.next_event() == TextDelta("a", (0,), 0, (shown(0),))
    session.on_news(TokenNews(0, [5], finished(FinishReason.STOP, 4, 5), [position(5)]))
    assert await session.next_event() == TextDelta("bc", (1, 2, 5), 0, (shown(1), shown(2), shown(5)))


async def test_a_hidden_stop_token_keeps_its_log_probability() -> None:
    session, _, _ = started()
    session.on_news(TokenNews(0, [0, 5], finished(FinishReason.STOP, 2, 5), [position(0), position(5)]))
    assert await session.next_event() == TextDelta("a", (0, 5), 0, (shown(0), shown(5)))


async def test_a_prompt_s_log_probabilities_come_first_and_in_parts() -> None:
    session, engine, _ = started()
    count = 2 * PROMPT_POSITIONS_PER_DELTA + 5
    prompt = [PositionLogprobs(None, 0, ()), *[position(1)] * (count - 1)]
    session.on_news(TokenNews(0, [0], finished(count=1), [position(0)], prompt))
    samples, failed = await read_all(session)
    assert failed is None
    assert engine.calls == ["close", "close"]
    *parts, last = samples[0].deltas
    assert [len(delta.prompt_logprobs) for delta in parts] == [PROMPT_POSITIONS_PER_DELTA] * 2 + [5]
    assert parts[0].prompt_logprobs[:2] == (TextPositionLogprobs(None, 0, ()), shown(1))
    assert last == TextDelta("a", (0,), 0, (shown(0),))


class Shouts:
    """A tool parser for which text between "x" and "z" is a call's arguments."""

    most_calls: int | None = None
    is_over = False

    def __init__(self) -> None:
        self._inside = False
        self._calls = 0

    def feed(self, text: str) -> tuple[str, tuple[ToolCallDelta, ...]]:
        visible, calls = "", []
        for character in text:
            if character == "x" and not self._inside:
                self._inside = True
                self._calls += 1
                calls.append(ToolCallDelta(self._calls - 1, f"call_{self._calls}", "shout", ""))
            elif character == "z" and self._inside:
                self._inside = False
            elif self._inside:
                calls.append(ToolCallDelta(self._calls - 1, None, None, character))
            else:
                visible += character
        return visible, tuple(calls)

    def finish(self) -> tuple[str, tuple[ToolCallDelta, ...]]:
        return ("!", ()) if self._inside else ("", ())


@pytest.mark.parametrize("closed", [True, False])
async def test_tool_calls_leave_the_text(closed: bool) -> None:
    session, _, _ = started(parsers=[None, Shouts()])
    a, x, z = 0, 23, 25
    session.on_news(news([a, x, a], index=1))
    session.on_news(news([a, x], finished(count=2), index=0))
    session.on_news(news([a, z] if closed else [a], finished(count=5), index=1))
    samples, _ = await read_all(session)
    assert (samples[0].text, samples[0].end is not None and samples[0].end.has_tool_calls) == ("ax", False)
    assert samples[1].text == ("a" if closed else "a!")
    assert samples[1].end is not None
    assert samples[1].end.has_tool_calls
    calls = [call for delta in samples[1].deltas for call in delta.tool_calls]
    assert calls[0] == ToolCallDelta(0, "call_1", "shout", "")
    assert "".join(call.arguments for call in calls) == "aa"


async def test_a_stop_string_ends_what_a_tool_parser_holds() -> None:
    session, _, _ = started("b", parsers=[Shouts()])
    session.on_news(news([23, 0, 1], finished(count=3)))
    samples, _ = await read_all(session)
    assert samples[0].text == "!"
    assert samples[0].end is not None
    assert (samples[0].end.stop_string, samples[0].end.has_tool_calls) == ("b", True)


@pytest.mark.parametrize(
    ("seed", "index", "wrapped"), [(5, 0, 5), (-1, 1, 0), (2**63 - 1, 1, -(2**63)), (2**63 - 2, 3, -(2**63) + 1)]
)
def test_seeds_wrap_at_int64(seed: int, index: int, wrapped: int) -> None:
    assert sample_seed(seed, index) == wrapped


@given(
    texts=st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=4),
    order=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4)), max_size=40),
    stops=st.lists(st.text("abcd", min_size=1, max_size=3), max_size=2),
    reads=st.lists(st.booleans(), min_size=40, max_size=40),
)
def test_each_sample_is_what_it_would_be_alone(
    texts: list[list[int]], order: list[tuple[int, int]], stops: list[str], reads: list[bool]
) -> None:
    """Text, tokens, log probabilities and end, however the news of the samples interleave and are read."""

    async def alone(tokens: list[int]) -> Read:
        session, _, _ = started(*stops, limits=ReadLimits())
        session.on_news(TokenNews(0, tokens, finished(count=len(tokens)), [position(t) for t in tokens]))
        return (await read_all(session))[0][0]

    async def together() -> dict[int, Read]:
        session, _, _ = started(*stops, limits=ReadLimits(), parsers=[None] * len(texts))
        reader = asyncio.create_task(read_all(session))
        rest = {index: list(tokens) for index, tokens in enumerate(texts)}
        for (index, count), read in zip(order, reads, strict=False):
            if rest.get(index):
                part, rest[index] = rest[index][:count], rest[index][count:]
                session.on_news(TokenNews(index, part, None, [position(t) for t in part]))
            if read:
                await asyncio.sleep(0)  # the reader's turn
        for index, part in rest.items():
            last = finished(count=len(texts[index]))
            session.on_news(TokenNews(index, part, last, [position(t) for t in part]))
        samples, failed = await reader
        assert failed is None
        return samples

    async def check() -> None:
        samples = await together()
        for index, tokens in enumerate(texts):
            one, many = await alone(tokens), samples[index]
            assert (many.text, many.token_ids) == (one.text, one.token_ids)
            assert [p for d in many.deltas for p in d.logprobs] == [p for d in one.deltas for p in d.logprobs]
            assert len([p for d in many.deltas for p in d.logprobs]) == len(many.token_ids)
            assert one.end is not None
            assert many.end == replace(one.end, seed=FACTS.seed + index, index=index)

    asyncio.run(check())
