"""TokenizerService over gRPC: each method parses, serves and answers; everything common is in `calls`.

Must not know: tokenizers, engines' protocol.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import grpc

from service_runtime.wire import Malformed, request_parser
from tokenizer_service.api.call import Call
from tokenizer_service.api.calls import CallRunner, ClientGone
from tokenizer_service.api.convert import (
    chat_draft,
    generate_draft,
    misplaced_special_tokens,
    skips_special_tokens,
    tokenize_prompt,
)
from tokenizer_service.api.responses import StreamResponse, delta_response, last_response, model_message
from tokenizer_service.engines.refusal import Refusal, RefusalCode, Violation, invalid, invalid_field
from tokenizer_service.sessions.conversation_rules import conversation_violations
from tokenizer_service.sessions.events import Completed, Failed, TextDelta
from tokenizer_service.sessions.intake import Intake
from tokenizer_service.sessions.request import ConversationPrompt, RequestDraft
from tokenizer_service.sessions.session import TextSession
from tokenizer_service.sessions.validation import MAX_VIOLATIONS, check_model
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb

SERVICE_NAME = "tokenwire.tokenizer.v1.TokenizerService"
_IDS_AT_ONCE = 50_000
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


@dataclass(frozen=True, slots=True)
class TokenizerServicer:
    """The methods of TokenizerService. `fingerprint` is that of the model's tokenizer."""

    runner: CallRunner
    intake: Intake
    fingerprint: str

    async def generate(self, request: pb.GenerateRequest | Malformed, context: Context) -> None:
        serve = partial(self._stream, context, generate_draft, pb.GenerateResponse)
        await self.runner.run("Generate", context, request, serve)

    async def chat(self, request: pb.ChatRequest | Malformed, context: Context) -> None:
        serve = partial(self._stream, context, chat_draft, pb.ChatResponse)
        await self.runner.run("Chat", context, request, serve)

    async def tokenize(self, request: pb.TokenizeRequest | Malformed, context: Context) -> bytes:
        return await self.runner.run("Tokenize", context, request, self._tokenize)

    async def detokenize(self, request: pb.DetokenizeRequest | Malformed, context: Context) -> bytes:
        return await self.runner.run("Detokenize", context, request, self._detokenize)

    async def list_models(self, request: pb.ListModelsRequest | Malformed, context: Context) -> bytes:
        return await self.runner.run("ListModels", context, request, self._list_models)

    async def _stream(
        self,
        context: Context,
        to_draft: Callable[[Any], RequestDraft],
        kind: type[StreamResponse],
        message: Any,
        call: Call,
    ) -> Refusal | None:
        async with self.intake.open(to_draft(message), call) as session:
            if isinstance(session, Refusal):
                return session
            return await _deliver(session, call, context, kind)

    async def _tokenize(self, request: pb.TokenizeRequest, _call: Call) -> bytes | Refusal:
        refusal = check_model(request.model, self.intake.model_name, self.intake.texts.router.adapter_names)
        if refusal is not None:
            return refusal
        prompt = tokenize_prompt(request)
        if prompt is None:
            return invalid_field("input", "nothing is given: set one of text and conversation")
        if isinstance(prompt, ConversationPrompt):
            violations = (
                *misplaced_special_tokens(request, "conversation"),
                *conversation_violations(
                    prompt, allow_chat_template=self.intake.allow_chat_template, prefix="conversation."
                ),
            )
            if violations:
                return invalid(violations[:MAX_VIOLATIONS])
        answer = await self.intake.texts.tokenize(prompt, _serialized_ids)
        return _rename_fields(answer) if isinstance(answer, Refusal) else answer

    async def _detokenize(self, request: pb.DetokenizeRequest, _call: Call) -> bytes | Refusal:
        refusal = check_model(request.model, self.intake.model_name, self.intake.texts.router.adapter_names)
        if refusal is not None:
            return refusal
        skips = skips_special_tokens(request)
        return await self.intake.texts.detokenize(request.token_ids, skips, _serialized_text)

    async def _list_models(self, _request: pb.ListModelsRequest, _call: Call) -> bytes:
        router = self.intake.texts.router
        model = model_message(
            self.intake.model_name,
            router.model(),
            vocab_size=self.intake.texts.encoder.vocab_size,
            fingerprint=self.fingerprint,
            connected=router.num_connected,
        )
        models = [model]
        for name in sorted(router.adapters()):
            models.append(pb.Model())
            models[-1].CopyFrom(model)
            models[-1].name, models[-1].parent = name, self.intake.model_name
            models[-1].connected_engines = router.num_with(name)
        return pb.ListModelsResponse(models=models).SerializeToString()


async def _deliver(session: TextSession, call: Call, context: Context, kind: type[StreamResponse]) -> Refusal | None:
    running = session.num_samples
    while running:
        match await session.next_event():
            case TextDelta() as delta:
                await _write(context, delta_response(kind, delta))
            case Completed() as end:
                running -= 1
                call.on_completed(end)
                await _write(context, last_response(kind, call.request_id, end))
            case Failed(refusal):
                return refusal
    return None


async def _write(context: Context, message: StreamResponse) -> None:
    """Waits while the client does not read. A cancel passes through; any other end is ClientGone."""
    try:
        await context.write(message)
    except (grpc.aio.UsageError, grpc.aio.InternalError, grpc.aio.BaseError) as error:
        raise ClientGone from error


def _serialized_ids(token_ids: list[int]) -> bytes:
    """In parts, so that a thread that makes a large answer gives the others their turns."""
    answer = pb.TokenizeResponse()
    for start in range(0, len(token_ids), _IDS_AT_ONCE):
        answer.token_ids.extend(token_ids[start : start + _IDS_AT_ONCE])
    return answer.SerializeToString()


def _serialized_text(text: str) -> bytes:
    return pb.DetokenizeResponse(text=text).SerializeToString()


def _rename_fields(refusal: Refusal) -> Refusal:
    """The encoder speaks of a generation's fields; TokenizeRequest calls them differently."""
    if refusal.code is not RefusalCode.INVALID_ARGUMENT:
        return refusal
    return invalid(tuple(Violation(_renamed(item.field), item.description) for item in refusal.violations))


def _renamed(field: str) -> str:
    return field if field == "text" else f"conversation.{field}"


def add_to_server(servicer: TokenizerServicer, server: grpc.aio.Server) -> None:
    """Registers the methods with our own reading of requests (see wire) and with answers that are bytes."""
    unary, stream = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
        "Generate": stream(
            servicer.generate, request_parser(pb.GenerateRequest), pb.GenerateResponse.SerializeToString
        ),
        "Chat": stream(servicer.chat, request_parser(pb.ChatRequest), pb.ChatResponse.SerializeToString),
        "Tokenize": unary(servicer.tokenize, request_parser(pb.TokenizeRequest), bytes),
        "Detokenize": unary(servicer.detokenize, request_parser(pb.DetokenizeRequest), bytes),
        "ListModels": unary(servicer.list_models, request_parser(pb.ListModelsRequest), bytes),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
