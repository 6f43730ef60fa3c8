"""Between the clients' protobuf messages and the plain data of this service.

Must not know: how requests are served.
"""

from collections.abc import Sequence
from typing import TypeAlias

from tokenizer_service.engines.messages import FinishReason, ModelInfo, SamplingOptions
from tokenizer_service.engines.refusal import Violation
from tokenizer_service.sessions.events import Completed, TextDelta
from tokenizer_service.sessions.request import (
    ConversationPrompt,
    GenerationOptions,
    IdsPrompt,
    Prompt,
    RequestDraft,
    TextPrompt,
)
from tokenizer_service.sessions.validation import MAX_MESSAGES
from tokenizer_service.text.messages import Message
from tokenwire.common.v1 import outcome_pb2, sampling_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2

StreamResponse: TypeAlias = tokenizer_pb2.GenerateResponse | tokenizer_pb2.ChatResponse

_REASONS = {
    FinishReason.STOP: outcome_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: outcome_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: outcome_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: outcome_pb2.FINISH_REASON_ERROR,
}


def generate_draft(request: tokenizer_pb2.GenerateRequest) -> RequestDraft:
    prompt: Prompt | None = None
    misplaced: tuple[Violation, ...] = ()
    match request.WhichOneof("prompt"):
        case "text":
            prompt = TextPrompt(request.text, _unless_unset(request, "add_special_tokens", True))
        case "token_ids":
            prompt = IdsPrompt(tuple(request.token_ids.ids))
            misplaced = misplaced_special_tokens(request, "token_ids")
    return RequestDraft(request.model, request.request_id, prompt, _options(request.options), misplaced)


def misplaced_special_tokens(
    request: tokenizer_pb2.GenerateRequest | tokenizer_pb2.TokenizeRequest, instead: str
) -> tuple[Violation, ...]:
    """`add_special_tokens` belongs to `text`; set beside `instead` it would be ignored."""
    if not request.HasField("add_special_tokens"):
        return ()
    return (Violation("add_special_tokens", f"has no meaning with {instead}; it may only be set with text"),)


def chat_draft(request: tokenizer_pb2.ChatRequest) -> RequestDraft:
    prompt = _conversation(request.messages, _unless_unset(request, "add_generation_prompt", True))
    return RequestDraft(request.model, request.request_id, prompt, _options(request.options))


def tokenize_prompt(request: tokenizer_pb2.TokenizeRequest) -> Prompt | None:
    """None when the client gave neither text nor conversation."""
    match request.WhichOneof("input"):
        case "text":
            return TextPrompt(request.text, _unless_unset(request, "add_special_tokens", True))
        case "conversation":
            conversation = request.conversation
            opens_turn = _unless_unset(conversation, "add_generation_prompt", True)
            return _conversation(conversation.messages, opens_turn)
    return None


def skips_special_tokens(request: tokenizer_pb2.DetokenizeRequest) -> bool:
    return _unless_unset(request, "skip_special_tokens", True)


def _unless_unset(
    message: "tokenizer_pb2.GenerateRequest | tokenizer_pb2.ChatRequest | tokenizer_pb2.TokenizeRequest"
    " | tokenizer_pb2.Conversation | tokenizer_pb2.DetokenizeRequest | tokenizer_pb2.GenerationOptions",
    field: str,
    default: bool,
) -> bool:
    return bool(getattr(message, field)) if message.HasField(field) else default  # type: ignore[arg-type]


def _conversation(messages: Sequence[tokenizer_pb2.ChatMessage], add_generation_prompt: bool) -> ConversationPrompt:
    """Of a hostile number of messages only those are copied that may be served."""
    kept = tuple(Message(message.role, message.content) for message in messages[:MAX_MESSAGES])
    return ConversationPrompt(kept, len(messages), add_generation_prompt)


def _options(options: tokenizer_pb2.GenerationOptions) -> GenerationOptions:
    return GenerationOptions(
        sampling=_sampling(options.sampling),
        stops=tuple(options.stop),
        include_stop=_unless_unset(options, "include_stop_str_in_output", False),
        skip_special_tokens=_unless_unset(options, "skip_special_tokens", True),
        cache_salt=options.cache_salt if options.HasField("cache_salt") else None,
    )


def _sampling(params: sampling_pb2.SamplingParams) -> SamplingOptions:
    return SamplingOptions(
        max_tokens=params.max_tokens if params.HasField("max_tokens") else None,
        min_tokens=params.min_tokens if params.HasField("min_tokens") else None,
        temperature=params.temperature if params.HasField("temperature") else None,
        top_k=params.top_k if params.HasField("top_k") else None,
        top_p=params.top_p if params.HasField("top_p") else None,
        min_p=params.min_p if params.HasField("min_p") else None,
        seed=params.seed if params.HasField("seed") else None,
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos if params.HasField("ignore_eos") else None,
    )


def delta_response(kind: type[StreamResponse], delta: TextDelta) -> StreamResponse:
    return kind(text=delta.text, token_ids=delta.token_ids)


def last_response(kind: type[StreamResponse], request_id: str, end: Completed) -> StreamResponse:
    completion = tokenizer_pb2.Completion(
        request_id=request_id,
        finish_reason=_REASONS[end.reason],
        usage=outcome_pb2.Usage(
            prompt_tokens=end.usage.prompt_tokens,
            completion_tokens=end.usage.completion_tokens,
            cached_tokens=end.usage.cached_tokens,
        ),
        seed=end.seed,
    )
    if end.stop_string is not None:
        completion.stop_string = end.stop_string
    elif end.stop_token_id is not None:
        completion.stop_token_id = end.stop_token_id
    return kind(completion=completion)


def model_message(
    name: str, model: ModelInfo | None, *, vocab_size: int, fingerprint: str, connected: int
) -> tokenizer_pb2.Model:
    """`model` is None while no engine is connected: then only our side is known."""
    if model is None:
        return tokenizer_pb2.Model(name=name, vocab_size=vocab_size, tokenizer_fingerprint=fingerprint)
    return tokenizer_pb2.Model(
        name=name,
        vocab_size=model.vocab_size,
        max_model_len=model.max_model_len,
        eos_token_ids=sorted(model.eos_token_ids),
        tokenizer_fingerprint=model.tokenizer_fingerprint,
        connected_engines=connected,
    )
