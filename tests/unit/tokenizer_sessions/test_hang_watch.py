"""When an engine counts as hung, in time that the test owns; and which engines may serve side by side."""

import asyncio
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokenizer_service.engines.hang_watch import HangWatch
from tokenizer_service.engines.messages import ModelInfo, SamplingOptions
from tokenizer_service.engines.one_model import OneModel

T = 16.0


@dataclass
class Engine:
    """`messages` are the times at which one comes, `steps` those at which the engine's loop takes a step.

    From `deaf_from` on it answers no question. Time passes only in `sleep` and in questions without an answer.
    """

    messages: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)
    deaf_from: float = float("inf")
    busy_until: float = float("inf")
    now: float = 0.0
    asked: list[float] = field(default_factory=list)
    watch: HangWatch = field(init=False)

    def __post_init__(self) -> None:
        self.watch = HangWatch(T, lambda: self.now < self.busy_until, lambda: self.now, self.sleep)

    async def sleep(self, seconds: float) -> None:
        end = self.now + seconds
        for time in sorted(self.messages):
            if self.now < time <= end:
                self.now = time
                self.watch.heard()
        self.now = end
        if end > 10_000:
            raise TimeoutError

    async def ask(self, timeout_s: float) -> float | None:
        self.asked.append(self.now)
        if self.now >= self.deaf_from:
            await self.sleep(timeout_s)
            return None
        taken = [time for time in self.steps if time <= self.now]
        return self.now - max(taken) if taken else None

    def verdict(self) -> float | None:
        """When it was found to hang; None: never."""

        async def run() -> None:
            self.watch.begin_work()
            await self.watch.wait(self.ask)

        try:
            asyncio.run(run())
        except TimeoutError:
            return None
        return self.now


@settings(deadline=None)
@given(
    st.lists(st.floats(0, 500), max_size=20),
    st.lists(st.floats(0, 500), max_size=20),
    st.one_of(st.just(float("inf")), st.floats(0, 500)),
)
def test_the_verdict_comes_when_it_must_and_never_while_the_engine_moves(
    messages: list[float], steps: list[float], deaf_from: float
) -> None:
    engine = Engine(messages, steps, deaf_from)
    found = engine.verdict()
    assert found is not None
    heard = max([time for time in messages if time <= found], default=0.0)
    known = max([time for time in steps if time <= found and time < deaf_from], default=0.0)
    # What it could not tell any more after its last answer does not count.
    told = max(
        [time for time in steps if any(asked >= time for asked in engine.asked if asked < deaf_from)], default=0.0
    )
    assert found - max(heard, told) >= T * 3 / 4
    assert found - max(heard, min(known, told)) <= T + 1e-6


def test_a_silent_engine_that_works_on_others_requests_is_left_alone() -> None:
    engine = Engine(steps=[float(time) for time in range(12_000)])
    assert engine.verdict() is None
    assert len(engine.asked) < 10_000 / (T / 2) * 2


@pytest.mark.parametrize("deaf_from", [0.0, float("inf")])
def test_a_stopped_process_is_found_within_the_time_and_so_is_a_stopped_loop(deaf_from: float) -> None:
    found = Engine(messages=[1.0, 2.0, 3.0], steps=[1.0, 2.0, 3.0], deaf_from=deaf_from).verdict()
    assert found is not None
    assert T * 3 / 4 <= found - 3.0 <= T


def test_an_engine_without_work_is_not_asked() -> None:
    async def run() -> None:
        engine = Engine(busy_until=-1.0)
        waiting = asyncio.create_task(engine.watch.wait(engine.ask))
        await asyncio.sleep(0)
        assert not waiting.done()
        assert engine.asked == []
        engine.busy_until, engine.now = float("inf"), 1000.0
        engine.watch.begin_work()
        await waiting
        assert 1000.0 + T * 3 / 4 <= engine.now <= 1000.0 + T

    asyncio.run(run())


def test_a_pause_of_our_own_process_is_not_held_against_the_engine() -> None:
    """After it the messages that came meanwhile are read while the engine is asked."""

    async def run() -> None:
        engine = Engine()
        engine.watch.begin_work()
        engine.now = 1000.0  # nothing was read for so long

        async def ask(timeout_s: float) -> float | None:
            engine.watch.heard()
            return None

        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.watch.wait(ask), 5)

    asyncio.run(run())


def test_the_first_engine_decides_until_none_is_left() -> None:
    model = OneModel()
    assert model.join("a", served("w1")) is None
    assert model.join("b", served("w1")) is None
    assert model.join("c", served("w2")) == "its weights are w2, those of a w1"
    assert model.join("c", served("")) == "its weights are unknown, those of a w1"
    assert model.join("a", served("w1")) is None
    model.leave("a")
    model.leave("c")  # it never joined
    assert model.join("c", served("w2")) is not None
    model.leave("b")
    assert model.join("c", served("w2")) is None
    assert model.join("a", served("w1")) == "its weights are w1, those of c w2"


def served(weights: str, vocab: int = 100, length: int = 50, **defaults: float) -> ModelInfo:
    sampling = SamplingOptions(**defaults)  # type: ignore[arg-type]
    return ModelInfo("m", vocab, length, frozenset({2}), "abc", "e", sampling, weights_fingerprint=weights)


def test_engines_with_other_numbers_of_ids_are_refused_with_both() -> None:
    model = OneModel()
    assert model.join("a", served("w1")) is None
    assert model.join("b", served("w1", 1128)) == "its model has 1,128 ids, that of a 100"
    model.leave("a")
    assert model.join("b", served("w1", 1128)) is None


def test_in_what_engines_may_differ_is_told_with_both_values() -> None:
    """A rolling change has both beside each other."""
    model = OneModel()
    for address, info in (
        ("a", served("w", length=4096)),
        ("b", served("w", length=8192)),
        ("c", served("w", length=4096, temperature=0.6)),
    ):
        assert model.join(address, info) is None
    assert next(model.differences("a")) == "its max_model_len is 4,096, that of b 8,192"
    model.leave("b")
    expected = "its default sampling is not that of a: temperature 0.6 here, None there"
    assert list(model.differences("c")) == [expected]
    model.leave("a")
    assert list(model.differences("c")) == []
