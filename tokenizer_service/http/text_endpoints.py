"""POST /tokenize and /detokenize.

Must not know: engines, how texts are encoded.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from tokenizer_service.engines.refusal import Refusal, invalid
from tokenizer_service.http.chat_fields import CHAT_NAMES, MessageFields, TemplateFields, check_messages, conversation
from tokenizer_service.http.errors import FieldNames, HttpError, bad_field, http_error
from tokenizer_service.http.exchange import Exchange, Receive, Scope, Send
from tokenizer_service.http.facts import compact
from tokenizer_service.http.fields import Fields, FieldsT
from tokenizer_service.http.json_body import ClientLeft
from tokenizer_service.http.plain_calls import PlainCalls
from tokenizer_service.sessions.conversation_rules import conversation_violations
from tokenizer_service.sessions.request import ConversationPrompt, Prompt, TextPrompt
from tokenizer_service.sessions.validation import MAX_VIOLATIONS, check_model

_TEXT_NAMES = FieldNames({"text": "prompt"})
_ID_NAMES = FieldNames({"token_ids": "tokens"})


class TokenizeFields(TemplateFields):
    """One of `prompt` and `messages`; what belongs to the other one may not be set."""

    model: str = ""
    prompt: str | None = None
    messages: list[MessageFields] | None = None
    add_special_tokens: bool | None = None


class DetokenizeFields(Fields):
    model: str = ""
    tokens: list[int]
    skip_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TextEndpoints:
    """Each method is an ASGI application for one route."""

    calls: PlainCalls
    open_exchange: Callable[[Scope, Receive, Send], Exchange]
    model_name: str
    allow_chat_template: bool

    async def tokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(self.open_exchange(scope, receive, send), TokenizeFields, self._tokenize)

    async def detokenize(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._serve(self.open_exchange(scope, receive, send), DetokenizeFields, self._detokenize)

    async def _serve(
        self,
        exchange: Exchange,
        kind: type[FieldsT],
        work: Callable[[FieldsT, Exchange], Coroutine[Any, Any, bytes | HttpError]],
    ) -> None:
        try:
            fields = await exchange.read(kind)
            if isinstance(fields, HttpError):
                await exchange.fail(fields)
                return
            answer = await exchange.while_listening(work(fields, exchange))
            if isinstance(answer, HttpError):
                await exchange.fail(answer)
            else:
                await exchange.answer(answer)
        except ClientLeft:
            return

    async def _tokenize(self, fields: TokenizeFields, exchange: Exchange) -> bytes | HttpError:
        prompt = self._prompt(fields)
        if isinstance(prompt, HttpError):
            return prompt
        names = CHAT_NAMES if isinstance(prompt, ConversationPrompt) else _TEXT_NAMES
        model = self.calls.texts.router.model()
        longest = None if model is None else model.max_model_len

        def render(ids: list[int]) -> bytes:
            return compact({"count": len(ids), "max_model_len": longest, "tokens": ids})

        answer = await self.calls.run(
            "HttpTokenize", exchange.tenant, exchange.trace, lambda: self.calls.texts.tokenize(prompt, render)
        )
        return http_error(answer, names) if isinstance(answer, Refusal) else answer

    def _prompt(self, fields: TokenizeFields) -> Prompt | HttpError:
        refusal = check_model(fields.model, self.model_name, self.calls.texts.router.adapter_names)
        if refusal is not None:
            return http_error(refusal, FieldNames())
        if (fields.prompt is None) == (fields.messages is None):
            return bad_field("prompt", "one of prompt and messages is needed")
        if fields.prompt is not None:
            return self._text_prompt(fields)
        return self._conversation(fields, fields.messages or [])

    def _text_prompt(self, fields: TokenizeFields) -> Prompt | HttpError:
        misplaced = (TemplateFields.model_fields.keys()) & fields.model_fields_set
        if misplaced:
            return bad_field(min(misplaced), "has no meaning with prompt; it may only be set with messages")
        adds = fields.add_special_tokens
        return TextPrompt(fields.prompt or "", True if adds is None else adds)

    def _conversation(self, fields: TokenizeFields, messages: list[MessageFields]) -> Prompt | HttpError:
        if fields.add_special_tokens is not None:
            return bad_field("add_special_tokens", "has no meaning with messages; it may only be set with prompt")
        flaw = check_messages(messages)
        if flaw is not None:
            return flaw
        prompt = conversation(messages, fields)
        violations = tuple(conversation_violations(prompt, allow_chat_template=self.allow_chat_template))
        return http_error(invalid(violations[:MAX_VIOLATIONS]), CHAT_NAMES) if violations else prompt

    async def _detokenize(self, fields: DetokenizeFields, exchange: Exchange) -> bytes | HttpError:
        refusal = check_model(fields.model, self.model_name, self.calls.texts.router.adapter_names)
        if refusal is not None:
            return http_error(refusal, FieldNames())

        def render(text: str) -> bytes:
            return compact({"prompt": text})

        texts, skips = self.calls.texts, fields.skip_special_tokens
        answer = await self.calls.run(
            "HttpDetokenize",
            exchange.tenant,
            exchange.trace,
            lambda: texts.detokenize(fields.tokens, skips, render),
        )
        return http_error(answer, _ID_NAMES) if isinstance(answer, Refusal) else answer
