"""Runs every RPC the same way: a place among the active ones, one outcome, one log line, one status.

Must not know: what a method does.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc
import structlog

from service_runtime.slow_requests import SlowRequests, never_slow
from service_runtime.trace_context import TraceContext, context_of_headers
from service_runtime.tracing import Anchor, SpanKind, trace_id_of
from service_runtime.wire import Malformed
from tokenizer_service.api.call import Call
from tokenizer_service.api.call_trace import NO_CALL_TRACES, CallTraces
from tokenizer_service.api.errors import abort
from tokenizer_service.api.generation_metrics import rejection
from tokenizer_service.api.live_calls import LiveCalls
from tokenizer_service.api.metrics import TokenizerMetrics
from tokenizer_service.engines.refusal import Refusal, RefusalCode, Violation, invalid
from tokenizer_service.sessions.admission import Admission
from tokenizer_service.tenants.gate import Gate
from tokenizer_service.tenants.tenant import ANONYMOUS, Tenant

_log = structlog.get_logger()
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

# A client's deadline beyond this is none at all.
_LONGEST_DEADLINE_S = 1e8
# The transport may report the deadline a moment before our clock reaches it, or after.
_DEADLINE_TOLERANCE_S = 0.05
_TRANSPORT_ENDS_WITHIN_S = 1.0
_CLIENT_GONE = Refusal(RefusalCode.CANCELLED, "the client has gone")


class ClientGone(Exception):
    """The client left while a message was being written to it."""


@dataclass(frozen=True, slots=True)
class CallRunner:
    """`run` never lets a client's mistake or a failure of ours out as anything but a status.

    `new_id` names RPCs, until a client's own name for a request is known.
    """

    admission: Admission
    metrics: TokenizerMetrics
    gate: Gate
    new_id: Callable[[], str]
    slow: SlowRequests = field(default_factory=never_slow)
    traces: CallTraces = NO_CALL_TRACES
    live: LiveCalls = field(default_factory=LiveCalls)

    async def run(
        self,
        method: str,
        context: grpc.aio.ServicerContext[Any, Any],
        request: RequestT | Malformed,
        body: Callable[[RequestT, Call], Awaitable[ResponseT | Refusal]],
    ) -> ResponseT:
        """`body`'s answer; or ends the call with the status of its refusal."""
        call = self._grpc_call(method, context)
        tenant = self.gate.identify(authorization(context), certificate_names(context))
        if isinstance(tenant, Refusal):
            self._count_rejected(call, tenant)
            self.record(call, tenant.code.name)
            await abort(context, tenant)
        call.tenant = tenant
        outcome = await self.serve(call, request, body)
        if isinstance(outcome, Refusal):
            await _leave_to_transport(call, outcome)
            await abort(context, outcome, call.delivered)
        return outcome

    async def serve(
        self,
        call: Call,
        request: RequestT | Malformed,
        body: Callable[[RequestT, Call], Awaitable[ResponseT | Refusal]],
    ) -> ResponseT | Refusal:
        """`body`'s answer or why there is none, whatever the transport. Counts and logs the outcome once."""
        code = RefusalCode.CANCELLED.name
        try:
            with self.live.keep(call), structlog.contextvars.bound_contextvars(**trace_id_of(call.span)):
                outcome = await self._within_quota(call, request, body)
            self._count_rejected(call, outcome)
            code = outcome.code.name if isinstance(outcome, Refusal) else "OK"
        except asyncio.CancelledError:
            if call.deadline is not None and call.clock() >= call.deadline - _DEADLINE_TOLERANCE_S:
                code = RefusalCode.DEADLINE_EXCEEDED.name
            raise
        finally:
            self.record(call, code)
        return outcome

    @contextmanager
    def place_to_read(self, tenant: Tenant, refused: Callable[[], Call]) -> Iterator[Refusal | None]:
        """A place while a request is read, which may encode texts: the tenant's first, as for serving it.

        `refused` makes the call that a refusal is the end of; what is read becomes calls of its own.
        """
        with self.gate.quotas.place_to_read(tenant) as refusal, ExitStack() as stack:
            refusal = refusal or stack.enter_context(self.admission.place())
            if refusal is not None:
                call = refused()
                self._count_rejected(call, refusal)
                self.record(call, refusal.code.name)
            yield refusal

    def _count_rejected(self, call: Call, outcome: object) -> None:
        if not isinstance(outcome, Refusal):
            return
        if outcome.quota is not None:
            self.metrics.tenants.refused(call.tenant.name, outcome.quota.limit)
        reason = rejection(outcome, was_taken=call.prompt_tokens is not None)
        if reason is not None and not call.completion_tokens:
            self.metrics.generations.count_rejected(reason)

    def new_call(self, method: str, kind: SpanKind, parent: TraceContext | None, tenant: Tenant = ANONYMOUS) -> Call:
        """A call that begins now, without a deadline. `parent`: the trace that the caller is in."""
        clock = asyncio.get_running_loop().time
        anchor = Anchor.of(clock)
        span = self.traces.begin(method, kind, parent, anchor)
        return Call(method, self.metrics, clock, anchor.monotonic_s, None, tenant, span=span)

    def _grpc_call(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Call:
        call = self.new_call(method, SpanKind.SERVER, context_of_headers(context.invocation_metadata() or ()))
        call.request_id = self.new_id()
        remaining = context.time_remaining()
        if remaining and remaining < _LONGEST_DEADLINE_S:
            call.deadline = call.started + remaining
        return call

    async def _within_quota(
        self,
        call: Call,
        request: RequestT | Malformed,
        body: Callable[[RequestT, Call], Awaitable[ResponseT | Refusal]],
    ) -> ResponseT | Refusal:
        """A place among the tenant's requests comes before one among all."""
        refusal = self.gate.quotas.enter(call.tenant)
        if refusal is not None:
            return refusal
        try:
            return await self._outcome(call, request, body)
        finally:
            self.gate.quotas.of(call.tenant).leave(call.clock() - call.started)

    async def _outcome(
        self,
        call: Call,
        request: RequestT | Malformed,
        body: Callable[[RequestT, Call], Awaitable[ResponseT | Refusal]],
    ) -> ResponseT | Refusal:
        refusal = self.admission.enter()
        if refusal is not None:
            return refusal
        try:
            if isinstance(request, Malformed):
                return _malformed(request)
            return await body(request, call)
        except ClientGone:
            return _CLIENT_GONE
        except asyncio.CancelledError:
            # Only a cancel of this task comes from the transport; any other must not leave the client alone.
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return Refusal(RefusalCode.UNAVAILABLE, "the service gave up the request", retry_after_s=1.0)
        except Exception:
            _log.exception("request_failed", method=call.method, request_id=call.request_id)
            return Refusal(RefusalCode.INTERNAL, "the service failed on this request")
        finally:
            self.admission.leave()

    def record(self, call: Call, code: str) -> None:
        """Counts and logs how a call ended, and ends its trace."""
        ended = call.ended(code)  # before the end of the trace, which it names
        call.end_trace(code)
        self.metrics.requests.labels(method=call.method, code=code).inc()
        if ended is not None:
            self.metrics.generations.observe_end(ended)
        if call.tenant.name:
            self.metrics.tenants.ended(call.tenant.name, code, call.prompt_tokens or 0, call.completion_tokens)
        fields = {"method": call.method, "code": code, **call.fields()}
        _log.info("request_end", **fields)
        if call.is_generation and self.slow.is_slow(fields["seconds"]):
            self.metrics.slow_requests.inc()
            self.slow.tell(lambda: fields | call.slow_fields())


async def _leave_to_transport(call: Call, refusal: Refusal) -> None:
    """Raises CancelledError where the transport itself ends the call: a status of ours that comes after costs memory
    that grpc.aio never gives back (grpc/grpc issue 43360), at each call that is cancelled or late."""
    if refusal is _CLIENT_GONE:
        raise asyncio.CancelledError
    has_passed = call.deadline is not None and call.clock() >= call.deadline - _DEADLINE_TOLERANCE_S
    if refusal.code is RefusalCode.DEADLINE_EXCEEDED and has_passed:  # one that cannot be met is refused at once
        await asyncio.sleep(_TRANSPORT_ENDS_WITHIN_S)  # cancelled by the transport long before that


def authorization(context: grpc.aio.ServicerContext[Any, Any]) -> list[str]:
    """The values of that metadata key."""
    pairs = context.invocation_metadata() or ()
    return [str(value) for key, value in pairs if key == "authorization" and isinstance(value, str)]


def certificate_names(context: grpc.aio.ServicerContext[Any, Any]) -> list[str]:
    """Of a client that showed a certificate which was verified; the alternatives before the common name."""
    facts = context.auth_context()
    names = [*facts.get("x509_subject_alternative_name", ()), *facts.get("x509_common_name", ())]
    return [name.decode(errors="replace") for name in names]


def _malformed(request: Malformed) -> Refusal:
    if not request.field:
        return Refusal(RefusalCode.INVALID_ARGUMENT, request.description)
    return invalid((Violation(request.field, request.description),))
