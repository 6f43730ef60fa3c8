"""TextSession without sockets: the engine's news in, events out."""

import asyncio
import gc
import weakref
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.tokenizer_sessions.session_parts import FACTS, LIMITS, Engine, finished, news, started
from tokenizer_service.engines.messages import FinishReason, TokenSink, Usage
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.sessions.events import Completed, Failed, TextDelta
from tokenizer_service.sessions.session import ReadLimits, TextSession


async def events(session: TextSession) -> tuple[str, list[int], Completed | Failed]:
    text, token_ids = "", list[int]()
    while True:
        event = await asyncio.wait_for(session.next_event(), 5)
        if not isinstance(event, TextDelta):
            session.close()
            return text, token_ids, event
        assert event.text or event.token_ids
        text += event.text
        token_ids += event.token_ids


async def test_deltas_merge_while_nobody_reads() -> None:
    session, engine, watcher = started()
    session.on_news(news([0]))
    session.on_news(news([1, 2]))
    assert await session.next_event() == TextDelta("abc", (0, 1, 2))
    session.on_news(news([3], finished(count=4)))
    assert await events(session) == (
        "d",
        [3],
        Completed(FinishReason.LENGTH, Usage(3, 4, 0), None, None, 9),
    )
    assert engine.calls == ["close", "close"]
    assert watcher.tokens == {0: 4}


@dataclass(slots=True)
class KnowsItsSink(Engine):
    """As the real one does, which carries the request's prompt and tokens, too."""

    sink: TokenSink | None = None


async def test_a_session_that_was_closed_is_gone_at_once() -> None:
    """Not when the garbage collector comes by, thousands of requests later."""
    session, _, _ = started()
    assert session.start(lambda sink: KnowsItsSink(sink=sink)) is None
    alive = weakref.ref(session)
    gc.disable()
    try:
        session.on_news(news([0], finished(count=1)))
        assert isinstance((await events(session))[2], Completed)
        assert session.engines == ("engine",)
        del session
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("stop_id", "include", "text", "reported"),
    [(5, False, "ab", 5), (5, True, "abf", 5), (2, False, "ab", None), (2, True, "abc", None)],
)
async def test_stop_tokens(stop_id: int, include: bool, text: str, reported: int | None) -> None:
    """B024; a plain end of sequence (id 2 here) is no stop reason."""
    session, _, _ = started(facts=replace(FACTS, include_stop=include))
    session.on_news(news([0, 1, stop_id], finished(FinishReason.STOP, 3, stop_id)))
    got, ids, end = await events(session)
    assert (got, ids) == (text, [0, 1, stop_id])
    assert isinstance(end, Completed)
    assert end.stop_token_id == reported


async def test_a_stop_string_cancels_before_anyone_reads() -> None:
    session, engine, watcher = started("cd")
    session.on_news(news([0, 1, 2, 3, 4]))
    assert engine.calls == ["cancel 0"]
    session.on_news(news([5], finished(FinishReason.ABORT, 6, cached=2)))
    text, ids, end = await events(session)
    assert (text, ids) == ("ab", [0, 1, 2, 3])
    assert end == Completed(FinishReason.STOP, Usage(3, 4, 2), "cd", None, 9)
    assert watcher.stops == 1


@pytest.mark.parametrize("lost", [True, False], ids=["engine lost", "engine silent"])
async def test_a_stop_string_stands_whatever_the_engine_does_then(lost: bool) -> None:
    session, _, _ = started("b")
    session.on_news(news([0, 1]))
    if lost:
        session.on_lost(Refusal(RefusalCode.UNAVAILABLE, "lost"))
    text, _, end = await events(session)
    assert (text, end) == ("a", Completed(FinishReason.STOP, Usage(3, 2, 0), "b", None, 9))


async def test_a_stop_string_in_the_flushed_rest_counts() -> None:
    session, engine, _ = started("\ufffd")
    session.on_news(news([0, 100], finished(count=2, cached=1)))
    text, ids, end = await events(session)
    assert (text, ids) == ("a", [0, 100])
    assert end == Completed(FinishReason.STOP, Usage(3, 2, 1), "\ufffd", None, 9)
    assert "cancel 0" not in engine.calls


async def test_held_back_text_is_flushed_at_the_end() -> None:
    session, _, _ = started("bcd")
    session.on_news(news([0, 1, 2]))
    assert await session.next_event() == TextDelta("a", (0,))
    session.on_news(news([], finished(count=3)))
    assert (await events(session))[0] == "bc"


@pytest.mark.parametrize("how", ["tokens", "characters"])
async def test_an_unread_backlog_is_bounded_and_dropped(how: str) -> None:
    limits = replace(LIMITS, max_unread_chars=5) if how == "characters" else LIMITS
    limit = 5 if how == "characters" else 10
    session, engine, _ = started(limits=limits)
    session.on_news(news([0] * limit))
    assert engine.calls == []
    session.on_news(news([0]))
    assert engine.calls == ["close"]
    text, ids, end = await events(session)
    assert (text, ids) == ("", [])
    assert isinstance(end, Failed)
    assert end.refusal.code is RefusalCode.RESOURCE_EXHAUSTED
    assert f"{limit + 1} tokens" in end.refusal.message


async def test_a_failing_detokenizer_ends_its_own_request() -> None:
    """B140."""
    session, engine, _ = started()
    session.on_news(news([0]))
    session.on_news(news([666]))
    text, _, end = await events(session)
    assert text == "a"
    assert isinstance(end, Failed)
    assert end.refusal.code is RefusalCode.INTERNAL
    assert "broken" not in end.refusal.message
    assert engine.calls[0] == "close"


async def test_the_deadline_cancels_in_the_engine_although_nobody_reads() -> None:
    loop = asyncio.get_running_loop()
    session, engine, _ = started(facts=replace(FACTS, deadline=loop.time() + 0.02))
    session.on_news(news([0]))
    text, _, end = await events(session)
    assert text == "a"
    assert isinstance(end, Failed)
    assert end.refusal.code is RefusalCode.DEADLINE_EXCEEDED
    assert engine.calls[0] == "close"


async def test_nothing_comes_after_the_end() -> None:
    session, engine, watcher = started()
    session.close()
    session.on_news(news([0], finished(count=1)))
    session.on_lost(Refusal(RefusalCode.UNAVAILABLE, "lost"))
    text, _, end = await events(session)
    assert text == ""
    assert isinstance(end, Failed)
    assert end.refusal.code is RefusalCode.CANCELLED
    assert engine.calls[0] == "close"
    assert watcher.tokens == {}


@given(
    tokens=st.lists(st.integers(0, 4), max_size=30),
    cuts=st.lists(st.booleans(), min_size=30, max_size=30),
    stops=st.lists(st.text("abcde", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_the_result_depends_on_no_split_into_messages(
    tokens: list[int], cuts: list[bool], stops: list[str], include: bool
) -> None:
    """Against a plain reference on the whole text: the match that ends first wins, the longest of those."""

    async def run() -> tuple[str, list[int], Completed | Failed]:
        session, _, _ = started(*stops, facts=replace(FACTS, include_stop=include), limits=ReadLimits())
        part: list[int] = []
        for token_id, cut in zip(tokens, cuts, strict=False):
            part.append(token_id)
            if cut:
                session.on_news(news(part))
                part = []
        session.on_news(news(part, finished(count=len(tokens))))
        return await events(session)

    full = "".join(chr(ord("a") + token_id) for token_id in tokens)
    ends = [(full.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in full]
    text, ids, end = asyncio.run(run())
    assert isinstance(end, Completed)
    if not ends:
        assert (text, ids, end.reason) == (full, tokens, FinishReason.LENGTH)
        return
    place, _, stop = min(ends)
    shown = full[:place] if include else full[: place - len(stop)]
    assert (text, ids, end.stop_string) == (shown, tokens[:place], stop)
    assert end.usage.completion_tokens == place
