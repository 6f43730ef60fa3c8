"""The mailbox: frames, merging, bounds, waking and the end of either side."""

import asyncio
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.outcome import Finish, FinishReason, Refusal, RefusalCode, RequestNews
from engine_service.core.scheduler import Scheduler
from engine_service.loop.engine_process import engine_environment, launch_thread
from engine_service.loop.frames import FrameDecoder, encode_frame
from engine_service.loop.mailbox import EngineMailbox, FrontGone, FrontMailbox, socket_pair
from engine_service.loop.messages import Abort, RequestTiming, Shutdown, StepReport, StepTiming
from engine_service.loop.outbox import MAX_UNREAD_TIMINGS, Outbox
from tests.fixtures.scripted_engine import SMALL

STATS = Scheduler(SMALL).stats()
FINISH = Finish(FinishReason.LENGTH, 3, 2, 0)


def report(*news: RequestNews, steps: int = 1) -> StepReport:
    return StepReport(news, STATS, (StepTiming(0.5, 7),) * steps, (RequestTiming(1, 0.1, None, None),))


@given(st.lists(st.binary(max_size=300), max_size=8), st.lists(st.integers(1, 400), min_size=1, max_size=20))
def test_frames_survive_any_split(messages: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(encode_frame(message) for message in messages)
    decoder = FrameDecoder()
    received: list[object] = []
    for cut in cuts:
        received += decoder.feed(stream[:cut])
        stream = stream[cut:]
    received += decoder.feed(stream)
    assert received == messages


def test_report_crosses_the_wire_unchanged() -> None:
    sent = report(RequestNews(1, (5, 6)), RequestNews(2, (7,), FINISH))
    assert FrameDecoder().feed(encode_frame(sent)) == [sent]


def test_outbox_merges_the_news_of_each_request() -> None:
    outbox = Outbox()
    assert outbox.take() is None
    outbox.add(report(RequestNews(1, (5,)), RequestNews(2, (9,))))
    outbox.add(report(RequestNews(1, (6, 7), FINISH)))
    merged = outbox.take()
    assert merged is not None
    assert merged.news == (RequestNews(1, (5, 6, 7), FINISH), RequestNews(2, (9,)))
    assert len(merged.steps) == 2
    assert outbox.take() is None


def test_outbox_bounds_timings() -> None:
    outbox = Outbox()
    for _ in range(3):
        outbox.add(report(steps=MAX_UNREAD_TIMINGS // 2))
    merged = outbox.take()
    assert merged is not None
    assert len(merged.steps) == MAX_UNREAD_TIMINGS


def test_engine_never_waits_for_a_front_that_does_not_read() -> None:
    """Publishing megabytes returns at once; when the front reads at last, nothing was lost or doubled."""
    front_end, engine_end = socket_pair()
    mailbox = EngineMailbox(engine_end)
    expected: list[int] = []
    for step in range(3000):
        tokens = tuple(range(step, step + 100))
        expected += tokens
        mailbox.publish(report(RequestNews(1, tokens)))
    received: list[int] = []
    decoder = FrameDecoder()
    num_messages = 0
    while len(received) < len(expected):
        for message in decoder.feed(front_end.recv(65536)):
            assert isinstance(message, StepReport)
            num_messages += 1
            received += message.news[0].token_ids
        mailbox.take(wait=False)
    assert received == expected
    assert num_messages < 3000
    front_end.close()
    mailbox.close()


def test_take_wakes_for_a_command_and_not_before() -> None:
    front_end, engine_end = socket_pair()
    mailbox = EngineMailbox(engine_end)
    abort = Abort((1, 2), Refusal(RefusalCode.CANCELLED, "x"))
    timer = threading.Timer(0.1, front_end.sendall, [encode_frame(abort) + encode_frame(Shutdown())])
    timer.start()
    started, used = time.monotonic(), time.thread_time()
    assert mailbox.take(wait=True) == [abort, Shutdown()]
    assert time.monotonic() - started > 0.05
    assert time.thread_time() - used < 0.02  # B148: waiting costs nothing
    timer.join()
    assert mailbox.take(wait=False) == []
    front_end.close()
    mailbox.close()


def test_take_wakes_after_the_deadline_and_never_early() -> None:
    front_end, engine_end = socket_pair()
    mailbox = EngineMailbox(engine_end)
    for timeout_s in (0.0, 0.0203, -1.0):
        started = time.monotonic()
        assert mailbox.take(wait=True, timeout_s=timeout_s) == []
        assert time.monotonic() - started >= timeout_s
    front_end.close()
    mailbox.close()


@pytest.mark.parametrize("wait", [True, False])
def test_closed_front_is_noticed(wait: bool) -> None:
    front_end, engine_end = socket_pair()
    front_end.close()
    mailbox = EngineMailbox(engine_end)
    with pytest.raises(FrontGone):
        mailbox.take(wait=wait)
    with pytest.raises(FrontGone):
        mailbox.send_now(Shutdown())
    mailbox.close()


async def test_front_refuses_beyond_its_bound_and_still_sends_aborts() -> None:
    front_end, engine_end = socket_pair()
    front = FrontMailbox(lambda message: None, lambda: None, max_unsent_bytes=100_000)
    assert not front.send(Shutdown())  # not connected
    await front.connect(front_end)
    accepted = 0
    while front.send(b"x" * 10_000):
        accepted += 1
        assert accepted < 1000
    assert front.send(Shutdown(), always=True)
    received: list[object] = []
    mailbox = EngineMailbox(engine_end)
    while len(received) < accepted + 1:
        received += await asyncio.to_thread(mailbox.take, wait=True, timeout_s=1.0)
    assert received[-1] == Shutdown()
    assert len(received) == accepted + 1
    front.close()
    mailbox.close()


async def test_thread_variant_talks_both_ways_and_ends_with_the_front() -> None:
    messages: list[object] = []
    arrived, closed = asyncio.Event(), asyncio.Event()

    def echo(mailbox: EngineMailbox) -> None:
        while True:
            for command in mailbox.take(wait=True):
                mailbox.send_now(("echo", command))

    def on_message(message: object) -> None:
        messages.append(message)
        arrived.set()

    launched = launch_thread(echo)
    front = FrontMailbox(on_message, closed.set)
    await front.connect(launched.front_end)
    front.send(Shutdown())
    await asyncio.wait_for(arrived.wait(), 5)
    assert messages == [("echo", Shutdown())]
    front.close()
    await asyncio.wait_for(closed.wait(), 5)
    assert await asyncio.wait_for(launched.engine.wait(), 5) == 0
    assert not front.send(Shutdown())


async def test_dead_engine_closes_the_front() -> None:
    closed = asyncio.Event()
    launched = launch_thread(lambda mailbox: None)
    front = FrontMailbox(lambda message: None, closed.set)
    await front.connect(launched.front_end)
    await asyncio.wait_for(closed.wait(), 5)


@pytest.mark.parametrize(
    ("environment", "threads", "expected"),
    [
        ({}, 0, {"OMP_WAIT_POLICY": "passive"}),
        ({"A": "b"}, 2, {"A": "b", "OMP_WAIT_POLICY": "passive", "OMP_NUM_THREADS": "2"}),
        (
            {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "9"},
            0,
            {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "9"},
        ),
    ],
)
def test_engine_environment(environment: dict[str, str], threads: int, expected: dict[str, str]) -> None:
    given_environment = dict(environment)
    assert engine_environment(environment, threads) == expected
    assert environment == given_environment
