"""Between the engine's protobuf messages and the plain data of this service.

Must not know: sessions, text.
"""

from collections.abc import Iterable, Sequence
from typing import overload

from google.protobuf.duration_pb2 import Duration

from service_runtime.trace_context import TraceContext
from tokenizer_service.engines.messages import (
    AdapterInfo,
    EngineFinish,
    FinishReason,
    ModelInfo,
    PositionLogprobs,
    StageTimes,
    TokenNews,
    TokenSubmission,
    Usage,
)
from tokenizer_service.engines.refusal import Refusal, RefusalCode, Violation
from tokenizer_service.engines.replica_load import EngineLoad
from tokenizer_service.engines.sampling_wire import fill_sampling, sampling_options
from tokenwire.common.v1 import logprobs_pb2, outcome_pb2
from tokenwire.engine.v1 import engine_pb2

_REASONS = {
    outcome_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    outcome_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    outcome_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    outcome_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}
# Where the engine's field names differ from the ones our clients know.
_CLIENT_FIELDS = (
    ("prompt_token_ids", "prompt"),
    ("sampling", "options.sampling"),
    ("cache_salt", "options.cache_salt"),
    ("priority", "options.priority"),
    ("adapter", "model"),
)


def submit_message(
    handle: int, submission: TokenSubmission, now: float, trace: TraceContext | None = None
) -> engine_pb2.SessionRequest:
    """The command that starts a generation; `now` is a reading of the clock of `submission.deadline`."""
    message = engine_pb2.SessionRequest()
    message.submit.handle = handle
    request = message.submit.request
    request.request_id = submission.request_id
    request.prompt_token_ids.extend(submission.token_ids)
    request.sampling.SetInParent()
    fill_sampling(request.sampling, submission.sampling)
    if submission.deadline is not None:
        request.timeout.FromNanoseconds(max(0, int((submission.deadline - now) * 1e9)))
    if submission.cache_salt is not None:
        request.cache_salt = submission.cache_salt
    if submission.priority is not None:
        request.priority = submission.priority
    if submission.resumed_token_ids:
        request.resumed_token_ids.extend(submission.resumed_token_ids)
    if submission.adapter:
        request.adapter, request.adapter_fingerprint = submission.adapter, submission.adapter_fingerprint
    if submission.tenant:
        request.tenant, request.weight = submission.tenant, submission.weight
    if trace is not None:
        request.trace.traceparent, request.trace.tracestate = trace.traceparent, trace.state
    return message


def cancel_message(handle: int, index: int | None) -> engine_pb2.SessionRequest:
    """Ends one sample; without `index` all of them."""
    return engine_pb2.SessionRequest(cancel=engine_pb2.CancelRequest(handle=handle, index=index))


def model_info(opened: engine_pb2.SessionOpened) -> ModelInfo:
    model = opened.model
    weights = f"{model.weights_fingerprint}/{model.dtype}" if model.weights_fingerprint else ""
    return ModelInfo(
        name=model.model_name,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=frozenset(model.eos_token_ids),
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        engine_epoch=opened.engine_epoch,
        default_sampling=sampling_options(model.default_sampling),
        weights_fingerprint=weights,
        block_size=model.block_size,
        adapters=adapters_of(model.adapters),
    )


def adapters_of(adapters: Iterable[engine_pb2.LoraAdapter]) -> dict[str, AdapterInfo]:
    return {each.name: AdapterInfo(each.fingerprint, each.in_memory) for each in adapters}


def engine_load(load: engine_pb2.EngineLoad) -> EngineLoad:
    return EngineLoad(
        running=load.running_requests,
        waiting=load.waiting_requests,
        queued_tokens=load.queued_uncached_tokens,
        free_blocks=load.free_blocks,
        evictable_blocks=load.cached_blocks,
    )


def with_logprobs(news: TokenNews, output: engine_pb2.RequestOutput) -> TokenNews:
    """The news of a message with the log probabilities in it; the prompt's are read when they are asked for."""
    logprobs = tuple(_logprobs(position) for position in output.logprobs)
    return news._replace(logprobs=logprobs, prompt_logprobs=_UnreadLogprobs(output.prompt_logprobs))


class _UnreadLogprobs(Sequence[PositionLogprobs]):
    """Positions of a message, read one by one: all those of a long prompt at once would hold up every request."""

    def __init__(self, positions: Sequence[logprobs_pb2.PositionLogprobs]) -> None:
        self._positions = positions

    def __len__(self) -> int:
        return len(self._positions)

    @overload
    def __getitem__(self, place: int) -> PositionLogprobs: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[PositionLogprobs]: ...

    def __getitem__(self, place: int | slice) -> PositionLogprobs | Sequence[PositionLogprobs]:
        if isinstance(place, slice):
            return tuple(_logprobs(position) for position in self._positions[place])
        return _logprobs(self._positions[place])


def _logprobs(position: logprobs_pb2.PositionLogprobs) -> PositionLogprobs:
    return PositionLogprobs(
        (position.token.token_id, position.token.logprob) if position.HasField("token") else None,
        position.rank,
        tuple([(each.token_id, each.logprob) for each in position.top]),
    )


def engine_finish(finish: engine_pb2.Finish) -> EngineFinish:
    """An ABORT or ERROR always carries a refusal afterwards, also when the engine named none."""
    reason = _REASONS.get(finish.reason, FinishReason.ERROR)
    refusal = _refusal(finish.error) if finish.HasField("error") else None
    if refusal is None and reason is FinishReason.ABORT:
        refusal = Refusal(RefusalCode.CANCELLED, "the engine aborted the request")
    if refusal is None and reason is FinishReason.ERROR:
        refusal = Refusal(RefusalCode.INTERNAL, "the engine failed to serve the request")
    usage = finish.usage
    return EngineFinish(
        reason=reason,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        stop_token_id=finish.stop_token_id if finish.HasField("stop_token_id") else None,
        refusal=refusal,
        stages=_stage_times(finish.stages) if finish.HasField("stages") else None,
    )


def _stage_times(stages: engine_pb2.StageDurations) -> StageTimes:
    seconds = _seconds(stages.queue), _seconds(stages.prefill), _seconds(stages.decode)
    return StageTimes(*seconds, stages.preemptions)


def _seconds(duration: Duration) -> float:
    return duration.ToNanoseconds() / 1e9


def _refusal(error: outcome_pb2.RequestError) -> Refusal:
    try:
        code = RefusalCode(error.grpc_code)
    except ValueError:
        code = RefusalCode.INTERNAL
    violations = tuple(Violation(_client_field(item.field), item.description) for item in error.field_violations)
    delay = error.retry_delay.ToNanoseconds() / 1e9 if error.HasField("retry_delay") else None
    return Refusal(code, error.message, violations, delay)


def _client_field(field: str) -> str:
    name = field.removeprefix("request.")
    for prefix, ours in _CLIENT_FIELDS:
        if name.startswith(prefix):
            return ours + name.removeprefix(prefix)
    return name
