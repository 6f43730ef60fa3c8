"""Serves the generations of one HTTP request, one for each prompt; each is counted and logged like an RPC.

Must not know: HTTP, JSON, the shape of answers.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

from service_runtime.trace_context import TraceContext
from service_runtime.tracing import SpanKind
from tokenizer_service.api.call import Call
from tokenizer_service.api.calls import CallRunner
from tokenizer_service.engines.messages import Usage
from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.sessions.events import Completed, Failed, TextDelta
from tokenizer_service.sessions.intake import Intake
from tokenizer_service.sessions.request import RequestDraft
from tokenizer_service.sessions.session import TextSession
from tokenizer_service.tenants.tenant import ANONYMOUS, Tenant

# A refusal of the consumer's ends the request.
Consumer: TypeAlias = Callable[[int, TextDelta | Completed], Awaitable[Refusal | None]]


@dataclass(frozen=True, slots=True)
class PlacedRefusal:
    """Why the prompt at `place` is not (any longer) served; with it none of the others is.

    `delivered`: what had come until then, all prompts together; None: nothing.
    """

    place: int
    refusal: Refusal
    delivered: Usage | None = None


@dataclass(frozen=True, slots=True)
class Job:
    """What to generate for one HTTP request; `deadline` is a reading of the loop's clock, `trace` the request's."""

    method: str
    drafts: Sequence[RequestDraft]
    deadline: float | None
    tenant: Tenant = ANONYMOUS
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class Generations:
    """Common to all generating endpoints."""

    runner: CallRunner
    intake: Intake

    def place_to_read(
        self, method: str, tenant: Tenant, trace: TraceContext | None
    ) -> AbstractContextManager[Refusal | None]:
        """A place among the requests while one is read, which may encode and decode texts; or why there is none."""
        refused = partial(self.runner.new_call, method, SpanKind.INTERNAL, trace, tenant)
        return self.runner.place_to_read(tenant, refused)

    async def run(self, job: Job, consume: Consumer) -> PlacedRefusal | None:
        """Gives `consume` the events of every prompt, one at a time; none before all prompts are accepted."""
        calls = [self._new_call(job) for _ in job.drafts]
        failed = await self._serve_all(job, calls, consume)
        return None if failed is None else replace(failed, delivered=_delivered(calls))

    async def _serve_all(self, job: Job, calls: Sequence[Call], consume: Consumer) -> PlacedRefusal | None:
        if len(calls) == 1:
            return await self._serve(job, calls, 0, consume, None)
        barrier, lock = asyncio.Barrier(len(job.drafts)), asyncio.Lock()

        async def consume_alone(place: int, event: TextDelta | Completed) -> Refusal | None:
            async with lock:
                return await consume(place, event)

        serve = partial(self._serve, job, calls, consume=consume_alone, barrier=barrier)
        return await _first_refusal([asyncio.create_task(serve(place)) for place in range(len(job.drafts))])

    async def _serve(
        self, job: Job, calls: Sequence[Call], place: int, consume: Consumer, barrier: asyncio.Barrier | None
    ) -> PlacedRefusal | None:
        body = partial(self._generate, partial(consume, place), barrier)
        refusal = await self.runner.serve(calls[place], job.drafts[place], body)
        return None if refusal is None else PlacedRefusal(place, refusal)

    def _new_call(self, job: Job) -> Call:
        call = self.runner.new_call(job.method, SpanKind.INTERNAL, job.trace, job.tenant)
        call.deadline = job.deadline
        return call

    async def _generate(
        self,
        consume: Callable[[TextDelta | Completed], Awaitable[Refusal | None]],
        barrier: asyncio.Barrier | None,
        draft: RequestDraft,
        call: Call,
    ) -> Refusal | None:
        async with self.intake.open(draft, call) as session:
            if isinstance(session, Refusal):
                return session
            if barrier is not None:
                await barrier.wait()
            return await _deliver(session, call, consume)


async def _deliver(
    session: TextSession, call: Call, consume: Callable[[TextDelta | Completed], Awaitable[Refusal | None]]
) -> Refusal | None:
    running = session.num_samples
    while running:
        event = await session.next_event()
        if isinstance(event, Failed):
            return event.refusal
        if isinstance(event, Completed):
            running -= 1
            call.on_completed(event)
        refusal = await consume(event)
        if refusal is not None:
            return refusal
    return None


def _delivered(calls: Sequence[Call]) -> Usage | None:
    """Of all prompts that have begun."""
    parts = [part for call in calls if (part := call.delivered) is not None]
    if not parts:
        return None
    return Usage(
        sum(part.prompt_tokens for part in parts),
        sum(part.completion_tokens for part in parts),
        sum(part.cached_tokens for part in parts),
    )


async def _first_refusal(tasks: "list[asyncio.Task[PlacedRefusal | None]]") -> PlacedRefusal | None:
    """None when all are done; at the first refusal, or when the caller is cancelled, the others are cancelled."""
    try:
        for finished in asyncio.as_completed(tasks):
            refusal = await finished
            if refusal is not None:
                return refusal
        return None
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
