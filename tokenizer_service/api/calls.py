"""Runs every RPC the same way: a place among the active ones, one outcome, one log line, one status.

Must not know: what a method does.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import grpc
import structlog

from service_runtime.slow_requests import SlowRequests, never_slow
from service_runtime.wire import Malformed
from tokenizer_service.api.call_times import CallTimes
from tokenizer_service.api.errors import abort
from tokenizer_service.api.generation_metrics import EndedGeneration, rejection
from tokenizer_service.api.metrics import TokenizerMetrics
from tokenizer_service.engines.messages import SamplingOptions, StageTimes, Usage
from tokenizer_service.engines.refusal import Refusal, RefusalCode, Violation, invalid
from tokenizer_service.sessions.admission import Admission
from tokenizer_service.sessions.events import Completed
from tokenizer_service.sessions.request import GenerationOptions
from tokenizer_service.sessions.session import TextSession
from tokenizer_service.tenants.gate import Gate
from tokenizer_service.tenants.tenant import ANONYMOUS, Tenant

_log = structlog.get_logger()
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")

# A client's deadline beyond this is none at all.
_LONGEST_DEADLINE_S = 1e8
# The transport may report the deadline a moment before our clock reaches it.
_DEADLINE_TOLERANCE_S = 0.05


class ClientGone(Exception):
    """The client left while a message was being written to it."""


@dataclass(slots=True)
class Call:
    """One RPC in progress; the SessionObserver of its generation. Times in seconds of the loop's clock."""

    method: str
    metrics: TokenizerMetrics
    clock: Callable[[], float]
    started: float
    deadline: float | None
    tenant: Tenant = ANONYMOUS
    request_id: str = ""
    prompt_tokens: int | None = None
    tokens: int = 0
    first_token_at: float | None = None
    last_token_at: dict[int, float] = field(default_factory=dict)  # by sample
    end: Completed | None = None
    options: GenerationOptions | None = None
    trace_id: str = ""
    taken_at: float | None = None
    stages: StageTimes | None = None
    engines: tuple[str, ...] = ()

    def on_tokens(self, num_tokens: int, index: int) -> None:
        now = self.clock()
        last = self.last_token_at.get(index)
        if last is not None:
            self.metrics.generations.observe_inter_token((now - last) / num_tokens)
        elif self.first_token_at is None:
            self.first_token_at = now
            self.metrics.generations.observe_first_token(now - self.started, self.trace_id)
        self.last_token_at[index] = now
        self.tokens += num_tokens

    def on_completed(self, end: Completed) -> None:
        """A sample has ended. `end` then has the usage of all that have: the prompt once, completions summed."""
        self.metrics.generations.count_finished(end)
        if self.end is not None:
            before, new = self.end.usage, end.usage
            tokens = before.completion_tokens + new.completion_tokens
            cached = max(before.cached_tokens, new.cached_tokens)
            end = replace(end, usage=Usage(new.prompt_tokens, tokens, cached))
        self.end = end

    def on_taken(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.taken_at = self.clock()
        self.metrics.generations.validation.observe(self.taken_at - self.started)

    def on_left(self, session: TextSession) -> None:
        self.stages, self.engines = session.stages, session.engines

    def on_stop_string(self) -> None:
        self.metrics.stop_string_cancels.inc()

    @property
    def completion_tokens(self) -> int:
        """Of all samples, also of those that have not ended."""
        return max(self.tokens, self.end.usage.completion_tokens if self.end else 0)

    @property
    def delivered(self) -> Usage | None:
        """What the client has of a generation that has begun; what was cached is known of samples that ended."""
        if self.prompt_tokens is None or not self.completion_tokens:
            return None
        return Usage(self.prompt_tokens, self.completion_tokens, self.end.usage.cached_tokens if self.end else 0)

    def ended(self, code: str) -> EndedGeneration | None:
        """What metrics need of a generation that an engine has taken."""
        if self.prompt_tokens is None:
            return None
        sampling = SamplingOptions() if self.options is None else self.options.sampling
        return EndedGeneration(
            seconds=self.clock() - self.started,
            first_token_s=None if self.first_token_at is None else self.first_token_at - self.started,
            last_token_s=max(self.last_token_at.values()) - self.started if self.last_token_at else None,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.completion_tokens,
            max_tokens=sampling.max_tokens,
            samples=sampling.num_samples,
            is_good=code == "OK",
            trace_id=self.trace_id,
        )

    def fields(self) -> dict[str, Any]:
        """What the log line says: counts and times, never text."""
        seconds: dict[str, Any] = {"seconds": round(self.clock() - self.started, 6)}
        if self.request_id:  # without one HTTP's own, which every line of the request has, stays
            seconds["request_id"] = self.request_id
        if self.tenant.name:
            seconds["tenant"] = self.tenant.name
        if self.prompt_tokens is None:
            return seconds
        first = None if self.first_token_at is None else round(self.first_token_at - self.started, 6)
        usage = self.end.usage if self.end else Usage(self.prompt_tokens, self.tokens, 0)
        reason = self.end.reason.value if self.end else None
        return seconds | {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": usage.cached_tokens,
            "finish_reason": reason,
            "first_token_seconds": first,
        }

    @property
    def is_generation(self) -> bool:
        """Whether it was one, as far as could be told."""
        return self.options is not None

    def slow_fields(self) -> dict[str, Any]:
        """What the line about a slow generation says beside `fields`: its stages and where it was served."""
        failovers = max(0, len(self.engines) - 1)
        times = CallTimes(
            self.clock() - self.started, self._since(self.taken_at), self._since(self.first_token_at), self.stages
        )
        engine = self.engines[-1] if self.engines else None
        return times.stages(failovers) | {"engine": engine, "failovers": failovers}

    def _since(self, at: float | None) -> float | None:
        return None if at is None else at - self.started


@dataclass(frozen=True, slots=True)
class CallRunner:
    """`run` never lets a client's mistake or a failure of ours out as anything but a status."""

    admission: Admission
    metrics: TokenizerMetrics
    gate: Gate
    slow: SlowRequests = field(default_factory=never_slow)

    async def run(
        self,
        method: str,
        context: grpc.aio.ServicerContext[Any, Any],
        request: RequestT | Malformed,
        body: Callable[[RequestT, Call], Awaitable[ResponseT | Refusal]],
    ) -> ResponseT:
        """`body`'s answer; or ends the call with the status of its refusal."""
        call = self._new_call(method, context)
        tenant = self.gate.identify(authorization(context), certificate_names(context))
        if isinstance(tenant, Refusal):
            self._count_rejected(call, tenant)
            self.record(call, tenant.code.name)
            await abort(context, tenant)
        call.tenant = tenant
        outcome = await self.serve(call, request, body)
        if isinstance(outcome, Refusal):
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
    def place_to_read(self, call: Call) -> Iterator[Refusal | None]:
        """A place while a request is read, which may encode texts: the tenant's first, as for serving it. A refusal is
        the end of the call."""
        with self.gate.quotas.place_to_read(call.tenant) as refusal, ExitStack() as stack:
            refusal = refusal or stack.enter_context(self.admission.place())
            if refusal is not None:
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

    def _new_call(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> Call:
        clock = asyncio.get_running_loop().time
        now = clock()
        remaining = context.time_remaining()
        bounded = remaining is not None and remaining < _LONGEST_DEADLINE_S
        return Call(method, self.metrics, clock, now, now + remaining if remaining and bounded else None)

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
            return Refusal(RefusalCode.CANCELLED, "the client has gone")
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
        """Counts and logs how a call ended."""
        self.metrics.requests.labels(method=call.method, code=code).inc()
        if (ended := call.ended(code)) is not None:
            self.metrics.generations.observe_end(ended)
        if call.tenant.name:
            self.metrics.tenants.ended(call.tenant.name, code, call.prompt_tokens or 0, call.completion_tokens)
        fields = {"method": call.method, "code": code, **call.fields()}
        _log.info("request_end", **fields)
        if call.is_generation and self.slow.is_slow(fields["seconds"]):
            self.metrics.slow_requests.inc()
            self.slow.tell(lambda: fields | call.slow_fields())


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
