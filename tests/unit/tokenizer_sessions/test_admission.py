"""Places, live ids and draining."""

import asyncio

from tokenizer_service.engines.refusal import RefusalCode
from tokenizer_service.sessions.admission import Admission


async def test_places_are_counted_and_given_back() -> None:
    admission = Admission(2)
    assert [admission.enter(), admission.enter()] == [None, None]
    refusal = admission.enter()
    assert refusal is not None
    assert refusal.code is RefusalCode.RESOURCE_EXHAUSTED
    admission.leave()
    assert admission.enter() is None
    assert admission.num_active == 2


async def test_draining_refuses_and_waits_for_the_last() -> None:
    admission = Admission(2)
    await admission.wait_idle()
    admission.enter()
    admission.drain()
    refusal = admission.enter()
    assert refusal is not None
    assert refusal.code is RefusalCode.UNAVAILABLE
    waiting = asyncio.create_task(admission.wait_idle())
    await asyncio.sleep(0)
    assert not waiting.done()
    admission.leave()
    await asyncio.wait_for(waiting, 1)


def test_an_id_is_live_once_for_each_tenant() -> None:
    admission = Admission(2)
    assert admission.claim_id("t", "a") is None
    refusal = admission.claim_id("t", "a")
    assert refusal is not None
    assert refusal.code is RefusalCode.ALREADY_EXISTS
    admission.release_id("t", "a")
    assert admission.claim_id("t", "a") is None
    assert admission.claim_id("u", "a") is None
    admission.release_id("u", "a")
    assert admission.claim_id("t", "a") is not None
