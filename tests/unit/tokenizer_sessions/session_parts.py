"""What a TextSession is tried with: letters for a tokenizer, an engine and an observer that take notes.

Must not know: sockets, real tokenizers.
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizer_service.engines.messages import EngineFinish, FinishReason, TokenNews, TokenSink, TokenStream, Usage
from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.sessions.assembler import TextAssembler, ToolParser
from tokenizer_service.sessions.events import Completed, Failed, TextDelta
from tokenizer_service.sessions.session import ReadLimits, SessionFacts, TextSession
from tokenizer_service.text.stop_strings import StopStrings


class Letters:
    """A detokenizer whose token n is the n-th letter; token 100 is the first half of "é", 101 the second."""

    def __init__(self) -> None:
        self._half = False

    def add(self, token_ids: Sequence[int]) -> str:
        return "".join(self._one(token_id) for token_id in token_ids)

    def _one(self, token_id: int) -> str:
        if token_id == 666:
            raise RuntimeError("broken")
        if token_id == 100:
            self._half = True
            return ""
        if token_id == 101:
            self._half = False
            return "é"
        return chr(ord("a") + token_id)

    def finish(self) -> str:
        return "\ufffd" if self._half else ""


@dataclass(slots=True)
class Engine:
    """Records what the session asks of its stream."""

    calls: list[str] = field(default_factory=list)
    engines: tuple[str, ...] = ("engine",)

    def cancel(self, index: int | None = None) -> None:
        self.calls.append("cancel" if index is None else f"cancel {index}")

    def close(self) -> None:
        self.calls.append("close")


@dataclass(slots=True)
class Watcher:
    tokens: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    stops: int = 0
    ends: int = 0

    def on_tokens(self, num_tokens: int, index: int) -> None:
        self.tokens[index] += num_tokens

    def on_stop_string(self) -> None:
        self.stops += 1

    def on_generated(self) -> None:
        self.ends += 1


FACTS = SessionFacts(
    request_id="r", prompt_tokens=3, seed=9, deadline=None, include_stop=False, hidden_stop_reasons=frozenset({2})
)
LIMITS = ReadLimits(max_unread_tokens=10, max_unread_chars=1000, last_word_timeout_s=0.05)


def letter(token_id: int) -> bytes:
    return chr(ord("a") + token_id).encode()


def started(
    *stops: str,
    facts: SessionFacts = FACTS,
    limits: ReadLimits = LIMITS,
    parsers: Sequence[ToolParser | None] = (None,),
) -> tuple[TextSession, Engine, Watcher]:
    """A session of as many samples as `parsers`."""
    engine, watcher = Engine(), Watcher()
    assemblers = [
        TextAssembler(Letters(), StopStrings(stops, include=facts.include_stop) if stops else None, parser)
        for parser in parsers
    ]
    session = TextSession(facts, assemblers, limits, watcher, letter)

    def submit(_sink: TokenSink) -> TokenStream | Refusal:
        return engine

    assert session.start(submit) is None
    return session, engine, watcher


def news(token_ids: Sequence[int], finish: EngineFinish | None = None, index: int = 0) -> TokenNews:
    return TokenNews(index, token_ids, finish)


def finished(
    reason: FinishReason = FinishReason.LENGTH, count: int = 0, stop: int | None = None, cached: int = 0
) -> EngineFinish:
    return EngineFinish(reason, Usage(3, count, cached), stop)


@dataclass(slots=True)
class Read:
    """All that the reader got of one sample."""

    deltas: list[TextDelta] = field(default_factory=list)
    end: Completed | None = None

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def token_ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in delta.token_ids]


async def read_all(session: TextSession) -> tuple[dict[int, Read], Failed | None]:
    """Reads to the end, by sample; asserts that a sample ends once and says nothing afterwards."""
    samples: dict[int, Read] = defaultdict(Read)
    running = session.num_samples
    while running:
        event = await asyncio.wait_for(session.next_event(), 5)
        match event:
            case TextDelta():
                assert samples[event.index].end is None
                assert event.text or event.token_ids or event.tool_calls or event.prompt_logprobs
                samples[event.index].deltas.append(event)
            case Completed():
                assert samples[event.index].end is None
                samples[event.index].end = event
                running -= 1
            case Failed():
                session.close()
                return dict(samples), event
    session.close()
    return dict(samples), None
