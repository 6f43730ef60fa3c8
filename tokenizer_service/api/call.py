"""One call in progress: what is known of it, and what its log line, metrics and trace tell of it.

Must not know: what a method does, transports.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from service_runtime.tracing import UNTRACED, Attributes, Span, Value, trace_id_of
from tokenizer_service.api.call_times import CallTimes
from tokenizer_service.api.call_trace import TimedAssembler, end_call, sampling_facts, usage_facts
from tokenizer_service.api.generation_metrics import EndedGeneration
from tokenizer_service.api.metrics import TokenizerMetrics
from tokenizer_service.engines.messages import SamplingOptions, StageTimes, Usage
from tokenizer_service.sessions.assembler import Assembler
from tokenizer_service.sessions.events import Completed
from tokenizer_service.sessions.request import GenerationOptions
from tokenizer_service.sessions.session import TextSession
from tokenizer_service.tenants.tenant import ANONYMOUS, Tenant


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
    session: TextSession | None = None
    tokens: int = 0
    first_token_at: float | None = None
    last_token_at: dict[int, float] = field(default_factory=dict)  # by sample
    end: Completed | None = None
    options: GenerationOptions | None = None
    taken_at: float | None = None
    stages: StageTimes | None = None
    engines: tuple[str, ...] = ()
    generated_at: float | None = None
    span: Span = UNTRACED
    stage_ended_at: float | None = None  # of the last one that the trace tells of
    reasons: list[str] = field(default_factory=list)  # why samples ended
    assemblers: list[TimedAssembler] = field(default_factory=list)

    @property
    def trace_id(self) -> str:
        """Of a trace that can be found; empty otherwise."""
        context = self.span.context
        return context.trace_id if context is not None and self.span.is_recorded else ""

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
        self.reasons.append(end.reason.value)

    def on_taken(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.taken_at = self.clock()
        self.metrics.generations.validation.observe(self.taken_at - self.started)

    def on_left(self, session: TextSession) -> None:
        self.stages, self.engines = session.stages, session.engines

    def on_stop_string(self) -> None:
        self.metrics.stop_string_cancels.inc()

    def on_stage(self, name: str) -> None:
        """A stage is over that began where the one before ended, the first with the call."""
        if self.span.is_recorded:
            now = self.clock()
            self.span.stage(name, self.stage_ended_at or self.started, now)
            self.stage_ended_at = now

    def on_generated(self) -> None:
        self.generated_at = self.clock()

    def watched(self, assembler: Assembler) -> Assembler:
        """Takes the time of an assembler, where a trace will tell it."""
        if not self.span.is_recorded:
            return assembler
        self.assemblers.append(TimedAssembler(assembler))
        return self.assemblers[-1]

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

    def end_trace(self, code: str) -> None:
        """To be called once, however the call ended."""
        if not self.span.is_recorded:
            return
        now = self.clock()
        if self.generated_at is not None:
            self.span.stage("deliver", self.generated_at, now)
        if self.first_token_at is not None:
            self.span.event("first_token", self.first_token_at)
        end_call(self.span, code, now, self._trace_facts())

    def _trace_facts(self) -> Attributes:
        facts: dict[str, Value | None] = {
            "tokenwire.request_id": self.request_id or None,
            "tokenwire.tenant": self.tenant.name or None,
        }
        if self.options is not None:
            facts |= sampling_facts(self.options.sampling)
        if self.prompt_tokens is not None:
            usage = self.delivered or Usage(self.prompt_tokens, 0, 0)
            facts |= usage_facts(usage, self.reasons)
            facts["tokenwire.detokenize.duration"] = round(sum(each.seconds for each in self.assemblers), 9)
        return facts

    def fields(self) -> dict[str, Any]:
        """What the log line says: counts and times, never text."""
        seconds: dict[str, Any] = {"seconds": round(self.clock() - self.started, 6), **trace_id_of(self.span)}
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
        preemptions = 0 if self.stages is None else self.stages.preemptions
        return times.stages(failovers) | {"engine": engine, "failovers": failovers, "preemptions": preemptions}

    def _since(self, at: float | None) -> float | None:
        return None if at is None else at - self.started
