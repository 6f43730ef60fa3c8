"""Serves requests that generate nothing; each is counted and logged like an RPC.

Must not know: HTTP, JSON.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from tokenizer_service.api.calls import Call, CallRunner
from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.sessions.text_service import TextService
from tokenizer_service.tenants.tenant import Tenant


@dataclass(frozen=True, slots=True)
class PlainCalls:
    """`run` takes one of the service's places for the time of the work."""

    runner: CallRunner
    texts: TextService

    async def run(self, method: str, tenant: Tenant, work: Callable[[], Awaitable[bytes | Refusal]]) -> bytes | Refusal:
        async def body(_nothing: None, _call: Call) -> bytes | Refusal:
            return await work()

        clock = asyncio.get_running_loop().time
        call = Call(method, self.runner.metrics, clock, clock(), None, tenant)
        return await self.runner.serve(call, None, body)
