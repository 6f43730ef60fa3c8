"""From a gateway's request to ours: what has a field of the same meaning is carried over, the rest is refused.

Ranges are not checked here: what comes out goes through the same door as every request.
Must not know: gRPC calls, what is running, text.
"""

from smg_grpc_proto import vllm_engine_pb2 as vllm_pb2

from engine_service.core.outcome import Refusal, RefusalCode
from tokenwire.common.v1 import sampling_pb2
from tokenwire.engine.v1 import engine_pb2

# Fields of GenerateRequest that ask for what this engine does not do.
_UNSUPPORTED = {
    "kv_transfer_params": "KV transfer between engines",
    "kv_transfer_params_json": "KV transfer between engines",
    "mm_inputs": "image, video and audio input",
    "media_refs": "image, video and audio input",
}
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024


def token_request(message: vllm_pb2.GenerateRequest) -> engine_pb2.TokenRequest | Refusal:
    """Our request for the same generation, stop strings left out; a refusal (INVALID) names the gateway's field."""
    refusal = _unsupported(message) or _unsupported_sampling(message.sampling_params) or _bad_stops(message)
    if refusal is not None:
        return refusal
    return engine_pb2.TokenRequest(
        request_id=message.request_id,
        prompt_token_ids=message.tokenized.input_ids,
        sampling=_sampling(message.sampling_params),
    )


def with_gateway_fields(refusal: Refusal) -> Refusal:
    """A refusal from our door, its field named as the gateway's request has it."""
    if refusal.field is None:
        return refusal
    field = refusal.field.removeprefix("request.")
    if field == "prompt_token_ids":
        field = "tokenized.input_ids"
    elif field.startswith("sampling."):
        field = "sampling_params." + field.removeprefix("sampling.")
    return Refusal(refusal.code, refusal.message, field, refusal.retry_after_s)


def _unsupported(message: vllm_pb2.GenerateRequest) -> Refusal | None:
    if message.WhichOneof("input") == "text":
        return _invalid("text", "the engine takes token ids, not text: send `tokenized`")
    for name, what in _UNSUPPORTED.items():
        if message.HasField(name):
            return _invalid(name, f"{name} is not supported: this engine does no {what}")
    if message.extra_mm_inputs:
        return _invalid("extra_mm_inputs", "extra_mm_inputs is not supported: this engine takes tokens only")
    if message.data_parallel_rank != 0:
        rank = message.data_parallel_rank
        return _invalid("data_parallel_rank", f"data_parallel_rank {rank} does not exist: the engine has rank 0 only")
    return None


def _unsupported_sampling(sampling: vllm_pb2.SamplingParams) -> Refusal | None:
    if sampling.HasField("truncate_prompt_tokens"):
        return _invalid(
            "sampling_params.truncate_prompt_tokens", "truncate_prompt_tokens is not supported: send a shorter prompt"
        )
    if sampling.WhichOneof("constraint") == "structural_tag":
        return _invalid(
            "sampling_params.structural_tag",
            "structural_tag is not supported: use json_schema, json_object, regex, grammar or choice",
        )
    return None


def _bad_stops(message: vllm_pb2.GenerateRequest) -> Refusal | None:
    stops = message.sampling_params.stop
    if len(stops) > MAX_STOP_STRINGS:
        return _invalid("sampling_params.stop", f"{len(stops):,} stop strings; at most {MAX_STOP_STRINGS} are allowed")
    for place, stop in enumerate(stops):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            return _invalid(
                "sampling_params.stop",
                f"stop string {place} has {len(stop):,} characters; 1 to {MAX_STOP_CHARACTERS:,} are allowed",
            )
    return None


def _sampling(given: vllm_pb2.SamplingParams) -> sampling_pb2.SamplingParams:
    """Every number is set, where the flavour cannot leave it open: the gateway has filled in what we advertise."""
    sampling = sampling_pb2.SamplingParams(
        min_tokens=given.min_tokens,
        top_k=given.top_k,
        # Zero is how this flavour writes "unset" of these two.
        top_p=given.top_p or 1.0,
        repetition_penalty=given.repetition_penalty or 1.0,
        min_p=given.min_p,
        presence_penalty=given.presence_penalty,
        frequency_penalty=given.frequency_penalty,
        stop_token_ids=given.stop_token_ids,
        ignore_eos=given.ignore_eos,
        logit_bias=given.logit_bias,
        n=given.n or 1,
    )
    for name in ("temperature", "max_tokens", "seed", "logprobs", "prompt_logprobs"):
        if given.HasField(name):
            setattr(sampling, name, getattr(given, name))
    _add_constraint(sampling, given)
    return sampling


def _add_constraint(sampling: sampling_pb2.SamplingParams, given: vllm_pb2.SamplingParams) -> None:
    name = given.WhichOneof("constraint")
    if name == "choice":
        sampling.structured_output.choice.values.extend(given.choice.choices)
    elif name is not None:
        setattr(sampling.structured_output, name, getattr(given, name))


def _invalid(field: str, message: str) -> Refusal:
    return Refusal(RefusalCode.INVALID, message, field)
