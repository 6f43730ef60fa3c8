"""From the wire to the engine: a TokenRequest becomes a checked request, or a refusal with field and numbers.

Every field is honoured or refused here. Must not know: gRPC calls, what is running.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from engine_service.api.invalid import Invalid
from engine_service.api.parse_sampling import parse_samples, parse_sampling
from engine_service.core.admission import EngineLimits, check_request, check_resumed
from engine_service.core.fairness import MAX_WEIGHT
from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.core.sampling import NEUTRAL_DEFAULTS, SamplingDefaults, SamplingParams
from service_runtime.trace_context import MAX_CHARACTERS as MAX_TRACE_CHARACTERS
from tokenwire.engine.v1 import engine_pb2

MAX_NAME_CHARACTERS = 256
MAX_TENANT_CHARACTERS = 64
_MAX_DURATION_SECONDS = 315_576_000_000
_NANOS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request that the engine can serve. `timeout_s` counts from now; the other fields are those of `Submit`."""

    name: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float | None
    cache_salt: str
    samples: int = 1
    priority: int = 0
    resumed: tuple[int, ...] = ()
    tenant: str = ""
    weight: int = 1
    adapter: str = ""
    adapter_fingerprint: str = ""


def parse_token_request(
    message: engine_pb2.TokenRequest,
    limits: EngineLimits,
    *,
    call_timeout_s: float | None,
    draw_seed: Callable[[], int],
    draw_name: Callable[[], str],
    defaults: SamplingDefaults = NEUTRAL_DEFAULTS,
) -> EngineRequest | Refusal:
    """The validated request, or a refusal (INVALID) that names the field as `request.sampling.top_p`.

    `call_timeout_s` is the time left to the call; the earlier of the two limits counts. `draw_seed` and
    `draw_name` give the seed and the request id that the client left open, `defaults` what unset fields mean.
    """
    try:
        _check_name("request_id", message.request_id)
        _check_name("cache_salt", message.cache_salt)
        _check_name("adapter", message.adapter)
        _check_name("adapter_fingerprint", message.adapter_fingerprint)
        if message.adapter_fingerprint and not message.adapter:
            raise Invalid("adapter_fingerprint", "adapter_fingerprint is set, but no adapter is named")
        _check_name("tenant", message.tenant, MAX_TENANT_CHARACTERS)
        _check_name("trace", message.trace.traceparent, MAX_TRACE_CHARACTERS)
        _check_name("trace", message.trace.tracestate, MAX_TRACE_CHARACTERS)
        weight = _weight(message)
        token_ids = tuple(message.prompt_token_ids)
        sampling = parse_sampling(message.sampling, len(token_ids), limits, defaults, draw_seed)
        samples = parse_samples(message.sampling)
        resumed = _resumed(message, samples)
        timeout_s = _timeout(message, call_timeout_s)
    except Invalid as invalid:
        return Refusal(RefusalCode.INVALID, str(invalid), f"request.{invalid.field}")
    requested = message.sampling.max_tokens if message.sampling.HasField("max_tokens") else limits.max_model_len
    refusal = check_request(token_ids, sampling, limits) or check_resumed(len(token_ids), resumed, requested, limits)
    if refusal is not None:
        return Refusal(refusal.code, refusal.message, f"request.{refusal.field}", refusal.retry_after_s)
    name = message.request_id or draw_name()
    if resumed:  # the prompt was reported before the first of them
        sampling = replace(sampling, prompt_logprobs=None)
    return EngineRequest(
        name,
        token_ids,
        sampling,
        timeout_s,
        message.cache_salt,
        samples,
        message.priority,
        resumed,
        message.tenant,
        weight,
        message.adapter,
        message.adapter_fingerprint,
    )


def _resumed(message: engine_pb2.TokenRequest, samples: int) -> tuple[int, ...]:
    if message.resumed_token_ids and samples > 1:
        count = len(message.resumed_token_ids)
        raise Invalid("resumed_token_ids", f"{count:,} resumed tokens are those of one sample, but n is {samples:,}")
    return tuple(message.resumed_token_ids)


def _check_name(field: str, value: str, most: int = MAX_NAME_CHARACTERS) -> None:
    if len(value) > most:
        raise Invalid(field, f"{field} has {len(value):,} characters; at most {most} are allowed")


def _weight(message: engine_pb2.TokenRequest) -> int:
    if not message.HasField("weight"):
        return 1
    if not 1 <= message.weight <= MAX_WEIGHT:
        raise Invalid("weight", f"weight {message.weight:,} is not in 1..{MAX_WEIGHT:,}")
    return message.weight


def _timeout(message: engine_pb2.TokenRequest, call_timeout_s: float | None) -> float | None:
    if not message.HasField("timeout"):
        return call_timeout_s
    seconds, nanos = message.timeout.seconds, message.timeout.nanos
    if abs(nanos) >= _NANOS or abs(seconds) > _MAX_DURATION_SECONDS or seconds * nanos < 0:
        raise Invalid("timeout", f"timeout of {seconds:,} s and {nanos:,} ns is not a valid duration")
    timeout_s = seconds + nanos / _NANOS
    if timeout_s < 0:
        raise Invalid("timeout", f"timeout of {timeout_s:g} s is negative")
    return timeout_s if call_timeout_s is None else min(timeout_s, call_timeout_s)
