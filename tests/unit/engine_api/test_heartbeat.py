"""What is not held against the client of a session: what we did not read, and our own pauses."""

import asyncio
import time

from engine_service.api.heartbeat import HeartbeatWatch

BEAT_S = 0.05
LONG_S = 6 * BEAT_S


async def test_silence_while_nothing_is_read_is_none() -> None:
    watch = HeartbeatWatch(BEAT_S)
    waiting = asyncio.create_task(watch.wait_silent())
    with watch.paused():
        await asyncio.sleep(LONG_S)
        assert not waiting.done()
    async with asyncio.timeout(10):
        assert "0.15 s" in (await waiting).message


async def test_a_pause_of_the_process_is_one_heartbeat_at_most() -> None:
    watch = HeartbeatWatch(BEAT_S)
    waiting = asyncio.create_task(watch.wait_silent())
    await asyncio.sleep(0)  # it waits
    time.sleep(LONG_S)  # noqa: ASYNC251 (the event loop stands still)
    await asyncio.sleep(BEAT_S / 2)  # what was sent meanwhile is read
    assert not waiting.done()
    watch.heard()
    await asyncio.sleep(BEAT_S)
    assert not waiting.done()
    waiting.cancel()
