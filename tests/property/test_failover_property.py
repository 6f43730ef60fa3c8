"""Whatever happens to the engines under a request, its sink hears of each sample's tokens once, in order, and its end.

The engines are a function of seed and position, so a token that is lost, repeated or of another sample is seen.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer_service.engines.losses import HUNG, LOST
from tokenizer_service.engines.messages import (
    EngineFinish,
    FinishReason,
    ModelInfo,
    ReplicaStream,
    SamplingOptions,
    TokenNews,
    TokenSink,
    TokenSubmission,
    Usage,
    sample_seed,
)
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.failover.backoff import Backoff
from tokenizer_service.failover.engine_ids import EngineIds
from tokenizer_service.failover.failover import Failover, FailoverLimits
from tokenizer_service.failover.retry_budget import BudgetLimits, RetryBudget

LENGTH = 7
SEED = 2**63 - 2  # the third sample's wraps
PROMPT = [1, 2, 3]
MODEL = ModelInfo("m", 100, 50, frozenset(), "t", "e", weights_fingerprint="w")
FULL = Refusal(RefusalCode.RESOURCE_EXHAUSTED, "full", retry_after_s=1.0)
STOPPING = Refusal(RefusalCode.UNAVAILABLE, "the engine service is shutting down")


def token(seed: int, position: int) -> int:
    return (seed * 31 + position * 7) % 97


@dataclass
class Held:
    """A submission that an engine has. A ReplicaStream."""

    replica: str
    submission: TokenSubmission
    sink: TokenSink
    cached: int
    model: ModelInfo = MODEL
    done: list[int] = field(default_factory=list)
    is_closed: bool = False
    cancelled: set[int] = field(default_factory=set)
    over: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.done = [len(self.submission.resumed_token_ids)] * self.submission.sampling.num_samples

    def cancel(self, index: int | None = None) -> None:
        self.cancelled |= set(range(len(self.done))) if index is None else {index}

    def close(self) -> None:
        self.is_closed = True

    def step(self, index: int, count: int) -> None:
        """Some tokens of one sample; the last ones with its end."""
        if self.is_closed or index >= len(self.done) or index in self.over:
            return
        if index in self.cancelled:
            self._finish(index, (), FinishReason.ABORT, Refusal(RefusalCode.CANCELLED, "cancelled"))
            return
        seed = self.submission.sampling.seed
        assert seed is not None
        first, end = self.done[index], min(LENGTH, self.done[index] + count)
        tokens = [token(sample_seed(seed, index), position) for position in range(first, end)]
        cached = self.cached if first == len(self.submission.resumed_token_ids) else 0
        self.done[index] = end
        if end == LENGTH:
            self._finish(index, tokens, FinishReason.LENGTH, None, cached)
        else:
            self.sink.on_news(TokenNews(index, tokens, None, (), (), cached))

    def refuse(self, refusal: Refusal) -> None:
        """The last word to every sample, as a door or a drain gives it."""
        for index in range(len(self.done)):
            if not self.is_closed and index not in self.over:
                self._finish(index, (), FinishReason.ERROR, refusal)

    def _finish(
        self, index: int, tokens: Sequence[int], reason: FinishReason, refusal: Refusal | None, cached: int = 0
    ) -> None:
        self.over.add(index)
        usage = Usage(len(PROMPT), self.done[index], self.cached)
        self.sink.on_news(TokenNews(index, tokens, EngineFinish(reason, usage, None, refusal), (), (), cached))


@dataclass
class Fleet:
    """A Chooser over three engines that take everything, unless `is_away`."""

    held: list[Held] = field(default_factory=list)
    is_away: bool = False

    def submit(
        self, submission: TokenSubmission, sink: TokenSink, avoid: frozenset[str] = frozenset()
    ) -> ReplicaStream | Refusal:
        if self.is_away:
            return Refusal(RefusalCode.UNAVAILABLE, "no engine is connected")
        names = [f"e{number}" for number in range(3)]
        name = next((name for name in names if name not in avoid), names[0])
        assert submission.request_id not in {held.submission.request_id for held in self.held}
        self._check(submission)
        self.held.append(Held(name, submission, sink, cached=len(self.held) % 3))
        return self.held[-1]

    def _check(self, submission: TokenSubmission) -> None:
        """What is resumed are the tokens that the first engine would have given."""
        resumed, seed = submission.resumed_token_ids, submission.sampling.seed
        assert seed is not None
        assert list(resumed) == [token(seed, position) for position in range(len(resumed))]
        assert not resumed or submission.sampling.num_samples == 1
        assert len(resumed) < LENGTH
        begins = submission.sampling.seed == SEED and not resumed
        assert (submission.sampling.prompt_logprobs is not None) == begins, "the prompt is told of once"


@dataclass
class Sink:
    tokens: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    ends: dict[int, EngineFinish] = field(default_factory=dict)
    lost: list[Refusal] = field(default_factory=list)

    def on_news(self, news: TokenNews) -> None:
        assert news.index not in self.ends
        assert not self.lost
        self.tokens.setdefault(news.index, []).extend(news.token_ids)
        if news.token_ids and news.index not in self.cached:
            self.cached[news.index] = news.cached_tokens
        if news.finish is not None:
            self.ends[news.index] = news.finish

    def on_lost(self, refusal: Refusal) -> None:
        self.lost.append(refusal)


@dataclass
class Counts:
    resumed: int = 0
    causes: list[str] = field(default_factory=list)

    def on_resumed(self, reason: str, num_tokens: int) -> None:
        assert reason in ("lost", "hang", "ended", "full")
        self.resumed += 1

    def on_given_up(self, cause: str) -> None:
        self.causes.append(cause)


def failover(fleet: Fleet, counts: Counts, attempts: int = 1000, wait_s: float = 60.0, burst: float = 1e6) -> Failover:
    limits = FailoverLimits(attempts, wait_s, Backoff(0.0, 0.0))
    budget = RetryBudget(BudgetLimits(0.0, burst, 0.0), lambda: 0.0)
    return Failover(fleet, limits, budget, EngineIds("s"), counts, lambda: 0.5)


def submission(samples: int = 1) -> TokenSubmission:
    return TokenSubmission("r", PROMPT, SamplingOptions(seed=SEED, n=samples, prompt_logprobs=0))


async def turn() -> None:
    """Timers of no delay have run afterwards."""
    for _ in range(4):
        await asyncio.sleep(0)


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(0, 3), st.integers(0, 2), st.integers(1, 4)),
        st.tuples(st.sampled_from(["lost", "hang", "full", "stopping", "late"]), st.integers(0, 3)),
        st.tuples(st.sampled_from(["away", "back"])),
    ),
    max_size=40,
)


def apply(fleet: Fleet, event: tuple) -> None:  # type: ignore[type-arg]
    if event[0] in ("away", "back"):
        fleet.is_away = event[0] == "away"
        return
    live = [held for held in fleet.held if not held.is_closed and len(held.over) < len(held.done)]
    if event[0] == "late":  # an old engine that has not noticed
        gone = [held for held in fleet.held if held.is_closed]
        if gone:
            gone[event[1] % len(gone)].sink.on_news(TokenNews(0, [55]))
        return
    if not live:
        return
    held = live[event[1] % len(live)]
    if event[0] == "step":
        held.step(event[2], event[3])
    elif event[0] in ("lost", "hang"):
        held.is_closed = True
        held.sink.on_lost(LOST if event[0] == "lost" else HUNG)
    elif event[0] == "stopping" or any(held.done):
        held.refuse(STOPPING)
    else:
        held.refuse(FULL)


@settings(max_examples=150, deadline=None)
@given(events=EVENTS, samples=st.integers(1, 3))
def test_every_token_comes_once_and_in_order(events: list[tuple], samples: int) -> None:  # type: ignore[type-arg]
    async def run() -> None:
        fleet, sink = Fleet(), Sink()
        assert not isinstance(failover(fleet, Counts()).submit(submission(samples), sink), Refusal)
        for event in events:
            apply(fleet, event)
            await turn()
        fleet.is_away = False
        for _ in range(100):
            for held in tuple(fleet.held):
                for index in range(samples):
                    held.step(index, 1)
            await turn()
        if sink.lost:  # a queue was full everywhere before any engine had begun
            assert sink.lost == [FULL]
            return
        for index in range(samples):
            seed = sample_seed(SEED, index)
            assert sink.tokens[index] == [token(seed, position) for position in range(LENGTH)]
            assert sink.ends[index].reason is FinishReason.LENGTH
            assert sink.ends[index].usage == Usage(len(PROMPT), LENGTH, sink.cached[index])

    asyncio.run(run())


async def test_it_ends_when_engine_after_engine_fails_it_and_not_before() -> None:
    fleet, sink, counts = Fleet(), Sink(), Counts()
    failover(fleet, counts, attempts=2).submit(submission(), sink)
    for _ in range(3):  # after a new token the count begins anew
        for _ in range(2):
            fleet.held[-1].sink.on_lost(LOST)
            await turn()
        fleet.held[-1].step(0, 1)
    assert not sink.lost
    for _ in range(3):
        fleet.held[-1].sink.on_lost(LOST)
        await turn()
    assert (sink.lost, counts.causes, counts.resumed) == ([LOST], ["attempts"], 8)
    assert len(fleet.held) == 9


async def test_a_request_that_kills_every_engine_does_not_go_through_all_of_them() -> None:
    fleet, sink = Fleet(), Sink()
    failover(fleet, Counts(), attempts=1).submit(submission(), sink)
    for _ in range(LENGTH - 1):
        fleet.held[-1].step(0, 1)
        fleet.held[-1].sink.on_lost(LOST)
        await turn()
    assert sink.lost == [LOST]
    assert len(fleet.held) == 5


async def test_the_budget_ends_a_storm() -> None:
    fleet, counts = Fleet(), Counts()
    shared = failover(fleet, counts, burst=10.0)
    sinks = [Sink() for _ in range(25)]
    for number, sink in enumerate(sinks):
        shared.submit(replace(submission(), request_id=f"r{number}"), sink)
    for held in tuple(fleet.held):
        held.sink.on_lost(LOST)
    await turn()
    assert (counts.resumed, counts.causes) == (10, ["budget"] * 15)
    assert sum(len(sink.lost) for sink in sinks) == 15


async def test_a_new_request_that_finds_every_queue_full_is_told_so() -> None:
    fleet, sink = Fleet(), Sink()
    failover(fleet, Counts()).submit(submission(), sink)
    for _ in range(3):
        fleet.held[-1].refuse(FULL)
        await turn()
    assert [held.replica for held in fleet.held[:3]] == ["e0", "e1", "e2"]
    assert sink.lost == [FULL]


async def test_one_that_had_begun_waits_for_room_and_for_an_engine_only_so_long() -> None:
    for refusal in (FULL, None):
        fleet, sink, counts = Fleet(), Sink(), Counts()
        failover(fleet, counts, wait_s=0.02).submit(submission(), sink)
        fleet.held[-1].step(0, 2)
        fleet.held[-1].sink.on_lost(LOST)
        fleet.is_away = refusal is None
        begin = asyncio.get_running_loop().time()
        while not sink.lost:
            if refusal is not None and not fleet.held[-1].is_closed:
                fleet.held[-1].refuse(refusal)
            await asyncio.sleep(0)
        assert asyncio.get_running_loop().time() - begin >= 0.02
        assert counts.causes == ["no_engine"]


async def test_engines_of_other_weights_take_nothing_over() -> None:
    fleet, sink, counts = Fleet(), Sink(), Counts()
    failover(fleet, counts).submit(submission(), sink)
    fleet.held[-1].step(0, 2)
    other = Fleet()

    def submit(*args: object) -> ReplicaStream:
        held = Held("x", submission(), sink, 0, ModelInfo("m", 100, 50, frozenset(), "t", "e"))
        other.held.append(held)
        return held

    fleet.submit = submit  # type: ignore[method-assign,assignment]
    fleet.held[-1].sink.on_lost(LOST)
    await turn()
    assert [refusal.code for refusal in sink.lost] == [RefusalCode.UNAVAILABLE]
    assert counts.causes == ["other_model"]
    assert other.held[0].is_closed


async def test_cancelled_samples_are_not_resumed_and_get_their_last_word() -> None:
    fleet, sink = Fleet(), Sink()
    stream = failover(fleet, Counts()).submit(submission(3), sink)
    assert not isinstance(stream, Refusal)
    for index in range(3):
        fleet.held[0].step(index, 2)
    stream.cancel(1)
    fleet.held[0].sink.on_lost(LOST)
    end = sink.ends[1]
    assert (end.reason, end.usage) == (FinishReason.ABORT, Usage(3, 2, 0))
    stream.cancel(0)  # while it waits for an engine
    assert sink.ends[0].usage == Usage(3, 2, 0)
    await turn()
    assert [held.submission.sampling.seed for held in fleet.held[1:]] == [sample_seed(SEED, 2)]
    stream.cancel(2)
    assert fleet.held[-1].cancelled == {0}
    stream.close()
    assert fleet.held[-1].is_closed


async def test_after_close_nothing_is_heard_or_sent() -> None:
    fleet, sink = Fleet(), Sink()
    stream = failover(fleet, Counts()).submit(submission(), sink)
    assert not isinstance(stream, Refusal)
    fleet.held[0].step(0, 1)
    fleet.held[0].sink.on_lost(LOST)
    stream.close()
    await turn()
    fleet.held[0].sink.on_news(TokenNews(0, [9]))
    assert (len(fleet.held), sink.lost, len(sink.tokens[0])) == (1, [], 1)


async def test_what_is_not_the_engines_fault_is_passed_on_at_once() -> None:
    codes = (RefusalCode.INVALID_ARGUMENT, RefusalCode.INTERNAL, RefusalCode.DEADLINE_EXCEEDED)
    too_slow = Refusal(RefusalCode.RESOURCE_EXHAUSTED, "the reader left 9 tokens unread")
    for refusal in [*(Refusal(code, "no") for code in codes), too_slow]:
        fleet, sink, counts = Fleet(), Sink(), Counts()
        failover(fleet, counts).submit(submission(), sink)
        fleet.held[0].step(0, 1)
        fleet.held[0].refuse(refusal)
        await turn()
        assert sink.ends[0].refusal == refusal
        assert (len(fleet.held), counts.causes) == (1, [])


async def test_a_resumption_that_no_engine_takes_is_not_the_clients_mistake() -> None:
    from tokenizer_service.engines.refusal import invalid_field

    fleet, sink = Fleet(), Sink()
    failover(fleet, Counts()).submit(submission(), sink)
    fleet.held[0].step(0, 1)
    fleet.held[0].sink.on_lost(LOST)
    await turn()
    fleet.held[1].refuse(invalid_field("resumed_token_ids", "no room"))
    assert [refusal.code for refusal in sink.lost] == [RefusalCode.UNAVAILABLE]
