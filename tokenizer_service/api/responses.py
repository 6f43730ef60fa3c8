"""The service's events as the messages that clients read.

Must not know: requests, how they are served.
"""

from collections.abc import Sequence
from typing import TypeAlias

from tokenizer_service.engines.messages import FinishReason, ModelInfo
from tokenizer_service.engines.sampling_wire import fill_sampling
from tokenizer_service.sessions.events import (
    Completed,
    TextDelta,
    TextLogprob,
    TextPositionLogprobs,
    ToolCallDelta,
)
from tokenwire.common.v1 import outcome_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2

StreamResponse: TypeAlias = tokenizer_pb2.GenerateResponse | tokenizer_pb2.ChatResponse

_REASONS = {
    FinishReason.STOP: outcome_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: outcome_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: outcome_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: outcome_pb2.FINISH_REASON_ERROR,
}


def delta_response(kind: type[StreamResponse], delta: TextDelta) -> StreamResponse:
    """Parts of tool calls go to a ChatResponse only: nothing else asks for them."""
    text, token_ids, index, logprobs, prompt_logprobs, tool_calls = delta
    message = kind(text=text, token_ids=token_ids)
    if index:
        message.index = index
    if logprobs:
        message.logprobs.extend(_positions(logprobs))
    if prompt_logprobs:
        message.prompt_logprobs.extend(_positions(prompt_logprobs))
    if tool_calls and isinstance(message, tokenizer_pb2.ChatResponse):
        message.tool_calls.extend(_tool_call(call) for call in tool_calls)
    return message


def _positions(positions: Sequence[TextPositionLogprobs]) -> list[tokenizer_pb2.TextPositionLogprobs]:
    return [
        tokenizer_pb2.TextPositionLogprobs(
            token=None if position.token is None else _logprob(position.token),
            rank=position.rank,
            top=[_logprob(each) for each in position.top],
        )
        for position in positions
    ]


def _logprob(logprob: TextLogprob) -> tokenizer_pb2.TextLogprob:
    return tokenizer_pb2.TextLogprob(token_id=logprob.token_id, token=logprob.token, logprob=logprob.logprob)


def _tool_call(call: ToolCallDelta) -> tokenizer_pb2.ToolCallDelta:
    return tokenizer_pb2.ToolCallDelta(index=call.index, id=call.id, name=call.name, arguments=call.arguments)


def last_response(kind: type[StreamResponse], request_id: str, end: Completed) -> StreamResponse:
    """The last message of a sample."""
    completion = tokenizer_pb2.Completion(
        request_id=request_id,
        finish_reason=_REASONS[end.reason],
        usage=outcome_pb2.Usage(
            prompt_tokens=end.usage.prompt_tokens,
            completion_tokens=end.usage.completion_tokens,
            cached_tokens=end.usage.cached_tokens,
        ),
        seed=end.seed,
        has_tool_calls=end.has_tool_calls,
    )
    if end.stop_string is not None:
        completion.stop_string = end.stop_string
    elif end.stop_token_id is not None:
        completion.stop_token_id = end.stop_token_id
    return kind(completion=completion, index=end.index)


def model_message(
    name: str, model: ModelInfo | None, *, vocab_size: int, fingerprint: str, connected: int
) -> tokenizer_pb2.Model:
    """`model` is None while no engine is connected: then only our side is known."""
    if model is None:
        return tokenizer_pb2.Model(name=name, vocab_size=vocab_size, tokenizer_fingerprint=fingerprint)
    message = tokenizer_pb2.Model(
        name=name,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=sorted(model.eos_token_ids),
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        connected_engines=connected,
    )
    message.default_sampling.SetInParent()
    fill_sampling(message.default_sampling, model.default_sampling)
    return message
