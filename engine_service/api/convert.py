"""From the engine to the wire: finishes, log probabilities, model information and load as protobuf messages.

Must not know: gRPC calls, validation, what is running.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from engine_service.api.errors import grpc_status
from engine_service.api.live_request import Unread
from engine_service.api.load_news import LoadFigures
from engine_service.core.outcome import Finish, FinishReason, PositionLogprobs, Refusal
from engine_service.core.sampling import SamplingDefaults
from engine_service.core.stats import EngineStats
from engine_service.core.weight_report import WeightReport
from engine_service.loop.messages import AdapterState, EngineInfo, RequestTiming
from tokenwire.common.v1 import logprobs_pb2, outcome_pb2, sampling_pb2
from tokenwire.engine.v1 import engine_pb2

# A few milliseconds' worth: a long prompt has hundreds of thousands of log probabilities.
_POSITIONS_AT_ONCE = 32

_REASON = {
    FinishReason.STOP: outcome_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: outcome_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: outcome_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: outcome_pb2.FINISH_REASON_ERROR,
}


def generate_response(unread: Unread, seed: int, index: int) -> engine_pb2.GenerateResponse:
    """The news of one sample, without the log probabilities of its prompt."""
    finish = None if unread.finish is None else finish_message(unread.finish, seed, unread.timing)
    message = engine_pb2.GenerateResponse(token_ids=unread.token_ids, finish=finish, index=index)
    _add_logprobs(message, unread)
    return message


def request_output(handle: int, unread: Unread, seed: int, index: int) -> engine_pb2.RequestOutput:
    """The news of one sample of a session's request, without the log probabilities of its prompt."""
    finish = None if unread.finish is None else finish_message(unread.finish, seed, unread.timing)
    message = engine_pb2.RequestOutput(handle=handle, token_ids=unread.token_ids, finish=finish, index=index)
    if unread.cached_tokens:
        message.cached_tokens = unread.cached_tokens
    _add_logprobs(message, unread)
    return message


def _add_logprobs(message: engine_pb2.GenerateResponse | engine_pb2.RequestOutput, unread: Unread) -> None:
    if unread.logprobs:
        message.logprobs.extend(logprobs_messages(unread.logprobs))


async def add_prompt_logprobs(
    message: engine_pb2.GenerateResponse | engine_pb2.RequestOutput, entries: Sequence[PositionLogprobs]
) -> None:
    """In parts, between which others have their turn."""
    for begin in range(0, len(entries), _POSITIONS_AT_ONCE):
        message.prompt_logprobs.extend(logprobs_messages(entries[begin : begin + _POSITIONS_AT_ONCE]))
        await asyncio.sleep(0)


def finish_message(finish: Finish, seed: int, timing: RequestTiming | None = None) -> engine_pb2.Finish:
    message = engine_pb2.Finish(
        reason=_REASON[finish.reason],
        usage=outcome_pb2.Usage(
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=finish.completion_tokens,
            cached_tokens=finish.cached_tokens,
        ),
        stop_token_id=finish.stop_token_id,
        seed=seed,
    )
    if finish.error is not None:
        message.error.CopyFrom(error_message(finish.error))
    if timing is not None:
        _fill_stages(message.stages, timing)
    return message


def _fill_stages(message: engine_pb2.StageDurations, timing: RequestTiming) -> None:
    message.queue.FromNanoseconds(round(timing.queue_s * 1e9))
    if timing.prefill_s is not None:
        message.prefill.FromNanoseconds(round(timing.prefill_s * 1e9))
    if timing.decode_s is not None:
        message.decode.FromNanoseconds(round(timing.decode_s * 1e9))
    message.preemptions = timing.preemptions


def error_message(refusal: Refusal) -> outcome_pb2.RequestError:
    message = outcome_pb2.RequestError(grpc_code=grpc_status(refusal.code).value[0], message=refusal.message)
    if refusal.field is not None:
        message.field_violations.add(field=refusal.field, description=refusal.message)
    if refusal.retry_after_s is not None:
        message.retry_delay.FromNanoseconds(int(refusal.retry_after_s * 1e9))
    return message


def model_info_message(
    info: EngineInfo, model_name: str, engine_version: str, adapters: Sequence[AdapterState] = ()
) -> engine_pb2.GetModelInfoResponse:
    return engine_pb2.GetModelInfoResponse(
        model_name=model_name,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        tokenizer_fingerprint=info.tokenizer_fingerprint,
        architecture=info.architecture,
        dtype=info.dtype,
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_num_requests=info.max_num_requests,
        engine_version=engine_version,
        default_sampling=default_sampling_message(info.default_sampling),
        weights_fingerprint=info.weights_fingerprint,
        adapters=[adapter_message(each) for each in adapters],
        weights=None if info.weights is None else _weights_message(info.weights),
    )


def adapter_message(adapter: AdapterState) -> engine_pb2.LoraAdapter:
    return engine_pb2.LoraAdapter(
        name=adapter.name, fingerprint=adapter.fingerprint, rank=adapter.rank, in_memory=adapter.is_resident
    )


def _weights_message(weights: WeightReport) -> engine_pb2.WeightReport:
    error = None if weights.error is None else engine_pb2.LogitError(**asdict(weights.error))
    return engine_pb2.WeightReport(source=weights.source, kept=weights.kept, error=error)


def default_sampling_message(defaults: SamplingDefaults) -> sampling_pb2.SamplingParams:
    """Every field that has a default of its own, neutral ones included: zero is not unset."""
    return sampling_pb2.SamplingParams(
        min_tokens=0,
        temperature=defaults.temperature,
        top_k=defaults.top_k,
        top_p=defaults.top_p,
        min_p=defaults.min_p,
        ignore_eos=False,
        repetition_penalty=defaults.repetition_penalty,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        n=1,
    )


def logprobs_messages(entries: Iterable[PositionLogprobs]) -> list[logprobs_pb2.PositionLogprobs]:
    """One message for each position."""
    return [_logprobs_message(entry) for entry in entries]


def _logprobs_message(entry: PositionLogprobs) -> logprobs_pb2.PositionLogprobs:
    message = logprobs_pb2.PositionLogprobs(rank=entry.rank)
    if entry.token is not None:
        message.token.token_id, message.token.logprob = entry.token
    for token_id, logprob in entry.top:
        message.top.add(token_id=token_id, logprob=logprob)
    return message


def load_news_message(load: LoadFigures) -> engine_pb2.EngineLoad:
    return engine_pb2.EngineLoad(
        running_requests=load.running,
        waiting_requests=load.waiting,
        queued_uncached_tokens=load.queued_uncached_tokens,
        total_blocks=load.total_blocks,
        used_blocks=load.used_blocks,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
    )


def load_message(
    stats: EngineStats, engine_pid: int, last_step_age_s: float | None, step_seconds: float
) -> engine_pb2.GetLoadResponse:
    """`step_seconds`: of all steps."""
    message = engine_pb2.GetLoadResponse(
        running_requests=stats.running,
        waiting_requests=stats.waiting,
        waiting_tokens=stats.waiting_tokens,
        total_blocks=stats.total_blocks,
        used_blocks=stats.used_blocks,
        free_blocks=stats.free_blocks,
        cached_blocks=stats.cached_blocks,
        steps_total=stats.steps,
        preemptions_total=stats.preemptions,
        prompt_tokens_total=stats.prompt_tokens,
        generated_tokens_total=stats.generated_tokens,
        cached_tokens_total=stats.cached_tokens,
        engine_pid=engine_pid,
        looked_up_tokens_total=stats.looked_up_tokens,
        evictions_total=stats.evictions,
        step_seconds_total=step_seconds,
    )
    if last_step_age_s is not None:
        message.last_step_age.FromNanoseconds(int(last_step_age_s * 1e9))
    return message
