"""What a trace tells of a request's time with one engine: a span for each engine that had it.

Must not know: grpc, how spans are recorded, other engines.
"""

import asyncio

from service_runtime.tracing import Span, SpanKind, Value
from tokenizer_service.engines.losses import reason_of
from tokenizer_service.engines.messages import TokenSubmission, Usage
from tokenizer_service.engines.refusal import Refusal, RefusalCode

CANCELLED = Refusal(RefusalCode.CANCELLED, "the request was cancelled")


def begin_attempt(submission: TokenSubmission, engine: str) -> Span:
    """From the choice of the engine (an address) on."""
    if not submission.span.is_recorded:
        return submission.span
    span = submission.span.child("generate", asyncio.get_running_loop().time(), SpanKind.CLIENT)
    span.set({"server.address": engine, "tokenwire.resumed_tokens": len(submission.resumed_token_ids) or None})
    return span


def end_attempt(span: Span, refusal: Refusal | None, usage: Usage | None = None) -> None:
    """To the engine's last word (`usage` then), its loss, or ours: `refusal` says why it did not end well."""
    if not span.is_recorded:
        return
    facts: dict[str, Value | None] = {}
    if usage is not None:
        facts["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        facts["gen_ai.usage.output_tokens"] = usage.completion_tokens
        facts["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    error = None
    if refusal is not None and refusal.code is RefusalCode.CANCELLED:
        # Ours, as after a stop string. Whether it is a failure of the request, the request's span says.
        facts["tokenwire.cancelled"] = True
    elif refusal is not None:
        error = refusal.code.name
        if refusal.code in (RefusalCode.UNAVAILABLE, RefusalCode.RESOURCE_EXHAUSTED):
            facts["tokenwire.loss"] = reason_of(refusal)
    span.end(asyncio.get_running_loop().time(), facts, error=error)
