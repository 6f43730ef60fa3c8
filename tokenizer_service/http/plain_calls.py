"""Serves requests that generate nothing; each is counted and logged like an RPC.

Must not know: HTTP, JSON.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from service_runtime.trace_context import TraceContext
from service_runtime.tracing import SpanKind
from tokenizer_service.api.call import Call
from tokenizer_service.api.calls import CallRunner
from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.sessions.text_service import TextService
from tokenizer_service.tenants.tenant import Tenant


@dataclass(frozen=True, slots=True)
class PlainCalls:
    """`run` takes one of the service's places for the time of the work."""

    runner: CallRunner
    texts: TextService

    async def run(
        self,
        method: str,
        tenant: Tenant,
        trace: TraceContext | None,
        work: Callable[[], Awaitable[bytes | Refusal]],
    ) -> bytes | Refusal:
        async def body(_nothing: None, _call: Call) -> bytes | Refusal:
            return await work()

        call = self.runner.new_call(method, SpanKind.INTERNAL, trace, tenant)
        return await self.runner.serve(call, None, body)
