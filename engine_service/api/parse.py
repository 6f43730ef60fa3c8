"""From the wire to the engine: a TokenRequest becomes a checked request, or a refusal with field and numbers.

Every field is honoured or refused here. Must not know: gRPC calls, what is running.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from engine_service.core.admission import EngineLimits, check_request, resolve_max_tokens
from engine_service.core.outcome import Refusal, RefusalCode
from engine_service.core.sampling import SamplingParams
from tokenwire.common.v1 import sampling_pb2
from tokenwire.engine.v1 import engine_pb2

MAX_NAME_CHARACTERS = 256
MAX_STOP_TOKEN_IDS = 256
_MAX_DURATION_SECONDS = 315_576_000_000
_NANOS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request that the engine can serve. `timeout_s` counts from now."""

    name: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_s: float | None
    cache_salt: str


class _Invalid(Exception):
    """Leaves the checks of one message at the first violation; never leaves this module."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.refusal = Refusal(RefusalCode.INVALID, message, f"request.{field}")


def parse_token_request(
    message: engine_pb2.TokenRequest,
    limits: EngineLimits,
    *,
    call_timeout_s: float | None,
    draw_seed: Callable[[], int],
    draw_name: Callable[[], str],
) -> EngineRequest | Refusal:
    """The validated request, or a refusal (INVALID) that names the field as `request.sampling.top_p`.

    `call_timeout_s` is the time left to the call; the earlier of the two limits counts. `draw_seed` and
    `draw_name` give the seed and the request id that the client left open.
    """
    try:
        _check_name("request_id", message.request_id)
        _check_name("cache_salt", message.cache_salt)
        token_ids = tuple(message.prompt_token_ids)
        sampling = _sampling(message.sampling, len(token_ids), limits, draw_seed)
        timeout_s = _timeout(message, call_timeout_s)
    except _Invalid as invalid:
        return invalid.refusal
    refusal = check_request(token_ids, sampling, limits)
    if refusal is not None:
        return Refusal(refusal.code, refusal.message, f"request.{refusal.field}", refusal.retry_after_s)
    return EngineRequest(message.request_id or draw_name(), token_ids, sampling, timeout_s, message.cache_salt)


def _check_name(field: str, value: str) -> None:
    if len(value) > MAX_NAME_CHARACTERS:
        raise _Invalid(field, f"{field} has {len(value):,} characters; at most {MAX_NAME_CHARACTERS} are allowed")


def _timeout(message: engine_pb2.TokenRequest, call_timeout_s: float | None) -> float | None:
    if not message.HasField("timeout"):
        return call_timeout_s
    seconds, nanos = message.timeout.seconds, message.timeout.nanos
    if abs(nanos) >= _NANOS or abs(seconds) > _MAX_DURATION_SECONDS or seconds * nanos < 0:
        raise _Invalid("timeout", f"timeout of {seconds:,} s and {nanos:,} ns is not a valid duration")
    timeout_s = seconds + nanos / _NANOS
    if timeout_s < 0:
        raise _Invalid("timeout", f"timeout of {timeout_s:g} s is negative")
    return timeout_s if call_timeout_s is None else min(timeout_s, call_timeout_s)


def _sampling(
    message: sampling_pb2.SamplingParams,
    prompt_tokens: int,
    limits: EngineLimits,
    draw_seed: Callable[[], int],
) -> SamplingParams:
    requested = message.max_tokens if message.HasField("max_tokens") else None
    if requested is not None and requested < 1:
        raise _Invalid("sampling.max_tokens", f"max_tokens {requested:,} is below 1")
    return SamplingParams(
        max_tokens=resolve_max_tokens(requested, prompt_tokens, limits.max_model_len),
        seed=message.seed if message.HasField("seed") else draw_seed(),
        min_tokens=_min_tokens(message, requested),
        temperature=_temperature(message),
        top_k=_top_k(message, limits.vocab_size),
        top_p=_top_p(message),
        min_p=_min_p(message),
        stop_token_ids=_stop_token_ids(message),
        ignore_eos=message.ignore_eos,
    )


def _min_tokens(message: sampling_pb2.SamplingParams, max_tokens: int | None) -> int:
    value = message.min_tokens
    if value < 0:
        raise _Invalid("sampling.min_tokens", f"min_tokens {value:,} is negative")
    if max_tokens is not None and value > max_tokens:
        raise _Invalid("sampling.min_tokens", f"min_tokens {value:,} exceeds max_tokens {max_tokens:,}")
    return value


def _temperature(message: sampling_pb2.SamplingParams) -> float:
    value = message.temperature if message.HasField("temperature") else 1.0
    if not math.isfinite(value) or value < 0.0:
        raise _Invalid("sampling.temperature", f"temperature {value:g} is not a finite number >= 0")
    return value


def _top_k(message: sampling_pb2.SamplingParams, vocab_size: int) -> int:
    value = message.top_k
    if value < -1:
        raise _Invalid("sampling.top_k", f"top_k {value:,} is below -1 (0 and -1: off)")
    return value if 0 < value < vocab_size else 0


def _top_p(message: sampling_pb2.SamplingParams) -> float:
    value = message.top_p if message.HasField("top_p") else 1.0
    if not 0.0 < value <= 1.0:  # refuses NaN too
        raise _Invalid("sampling.top_p", f"top_p {value:g} is not in (0, 1]")
    return value


def _min_p(message: sampling_pb2.SamplingParams) -> float:
    value = message.min_p
    if not 0.0 <= value <= 1.0:
        raise _Invalid("sampling.min_p", f"min_p {value:g} is not in [0, 1]")
    return value


def _stop_token_ids(message: sampling_pb2.SamplingParams) -> frozenset[int]:
    count = len(message.stop_token_ids)
    if count > MAX_STOP_TOKEN_IDS:
        raise _Invalid("sampling.stop_token_ids", f"{count:,} stop token ids; at most {MAX_STOP_TOKEN_IDS} are allowed")
    return frozenset(message.stop_token_ids)
