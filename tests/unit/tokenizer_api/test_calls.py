"""What is counted of a call, however it ends."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.fixtures.tokenizer_app import eventually
from tokenizer_service.api import calls
from tokenizer_service.api.call import Call
from tokenizer_service.api.calls import CallRunner, ClientGone
from tokenizer_service.api.metrics import TokenizerMetrics
from tokenizer_service.engines.messages import FinishReason, Usage
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.sessions.admission import Admission
from tokenizer_service.sessions.events import Completed
from tokenizer_service.tenants.gate import Gate
from tokenizer_service.tenants.quota import Quotas
from tokenizer_service.tenants.tenant import TenantTable


async def test_tokens_of_a_sample_that_did_not_end_are_counted_beside_those_of_one_that_did() -> None:
    registry = CollectorRegistry()
    gate = Gate(TenantTable, Quotas(lambda: 0.0, 1))
    runner = CallRunner(Admission(max_requests=1), TokenizerMetrics(registry), gate, lambda: "r")
    call = Call("Generate", runner.metrics, lambda: 0.0, 0.0, None)

    async def body(_request: None, call: Call) -> Refusal:
        call.prompt_tokens = 5
        call.on_tokens(3, 0)
        call.on_tokens(40, 1)
        call.on_completed(Completed(FinishReason.STOP, Usage(5, 3, 0), None, None, 7, 0))
        return Refusal(RefusalCode.CANCELLED, "the client has gone")

    await runner.serve(call, None, body)
    assert registry.get_sample_value("tokenwire_tokenizer_generated_tokens_total") == 43
    assert registry.get_sample_value("tokenwire_tokenizer_prompt_tokens_total") == 5
    assert call.fields()["completion_tokens"] == 43


def silent_context(seconds_left: float | None) -> Any:
    """A transport on which no status can be sent: `abort` would be an AttributeError."""
    return SimpleNamespace(invocation_metadata=tuple, auth_context=dict, time_remaining=lambda: seconds_left)


def new_runner() -> tuple[CallRunner, CollectorRegistry]:
    registry = CollectorRegistry()
    gate = Gate(TenantTable, Quotas(lambda: 0.0, 1))
    return CallRunner(Admission(max_requests=1), TokenizerMetrics(registry), gate, lambda: "r"), registry


def ended(registry: CollectorRegistry, code: str) -> float | None:
    return registry.get_sample_value("tokenwire_tokenizer_requests_total", {"method": "Generate", "code": code})


async def test_who_has_gone_is_told_nothing() -> None:
    runner, registry = new_runner()

    async def body(_request: object, _call: Call) -> Refusal:
        raise ClientGone

    with pytest.raises(asyncio.CancelledError):
        await runner.run("Generate", silent_context(None), object(), body)
    assert ended(registry, "CANCELLED") == 1
    with runner.admission.place() as refusal:
        assert refusal is None  # the place was given back


async def test_a_deadline_is_left_to_the_transport() -> None:
    """Whose cancel comes a moment later: a status after it would never be freed."""
    runner, registry = new_runner()

    async def body(_request: object, _call: Call) -> Refusal:
        return Refusal(RefusalCode.DEADLINE_EXCEEDED, "the deadline has passed")

    task = asyncio.create_task(runner.run("Generate", silent_context(0.01), object(), body))
    await eventually(lambda: ended(registry, "DEADLINE_EXCEEDED") == 1, 5.0)
    with runner.admission.place() as refusal:
        assert refusal is None  # it holds no place meanwhile
    assert not task.done()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_deadline_that_cannot_be_met_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long before it passes: the transport would not end the call."""
    runner, _ = new_runner()
    told = list[Refusal]()

    async def note(_context: object, refusal: Refusal, *_: object) -> None:
        told.append(refusal)

    async def body(_request: object, _call: Call) -> Refusal:
        return Refusal(RefusalCode.DEADLINE_EXCEEDED, "too late")

    monkeypatch.setattr(calls, "abort", note)
    monkeypatch.setattr(calls, "_TRANSPORT_ENDS_WITHIN_S", 3600.0)
    async with asyncio.timeout(30.0):
        await runner.run("Generate", silent_context(100.0), object(), body)
    assert [refusal.message for refusal in told] == ["too late"]
