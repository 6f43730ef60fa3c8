"""Takes a generation request in: checks its draft, claims its id, opens its session. The same for every transport.

Must not know: grpc, protobuf, HTTP, how events are delivered.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Protocol

import structlog

from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.routing.router import no_engine
from tokenizer_service.sessions.admission import Admission
from tokenizer_service.sessions.live import LiveSessions
from tokenizer_service.sessions.request import GenerationOptions, RequestDraft, TextRequest
from tokenizer_service.sessions.session import TextSession
from tokenizer_service.sessions.text_service import RequestObserver, TextService
from tokenizer_service.sessions.validation import MAX_ID_CHARS, RequestRules, check_model, validate_request
from tokenizer_service.tenants.quota import Quota, Quotas
from tokenizer_service.tenants.tenant import Tenant


class Caller(RequestObserver, Protocol):
    """Who asks: told what the request is called and asks for, and how long its prompt is, as soon as that is known.

    `deadline` is a reading of the event loop's clock (seconds), None for no deadline.
    """

    tenant: Tenant
    deadline: float | None
    request_id: str
    options: GenerationOptions | None
    prompt_tokens: int | None
    session: TextSession | None

    def on_taken(self, prompt_tokens: int) -> None:
        """An engine has it: from now on `prompt_tokens` are known."""

    def on_left(self, session: TextSession) -> None:
        """Its session is over, for whatever reason, and about to be closed."""

    @property
    def completion_tokens(self) -> int:
        """Delivered so far, of all samples."""
        ...


@dataclass(frozen=True, slots=True)
class Intake:
    """`model_name` is the only one served, beside adapters of it; `new_id` makes ids for requests that have none.

    `allow_chat_template`: a request may bring its own.
    """

    texts: TextService
    admission: Admission
    quotas: Quotas
    sessions: LiveSessions
    model_name: str
    new_id: Callable[[], str]
    allow_chat_template: bool = False

    @asynccontextmanager
    async def open(self, draft: RequestDraft, caller: Caller) -> AsyncIterator[TextSession | Refusal]:
        """The session of the draft, closed after the block, or why there is none. Its id is taken until then."""
        new_id = caller.request_id or self.new_id()
        # A refusal is logged under an id, too; one that is too long is no id.
        caller.request_id = draft.request_id if 0 < len(draft.request_id) <= MAX_ID_CHARS else new_id
        request = self._validate(draft, caller, new_id)
        if isinstance(request, Refusal):
            yield request
            return
        caller.request_id, caller.options = request.request_id, request.options
        refusal = self.admission.claim_id(request.tenant, request.request_id)
        if refusal is not None:
            yield refusal
            return
        caller.on_stage("validate")
        tokens = _TokenHold(self.quotas.of(caller.tenant), caller)
        try:
            with structlog.contextvars.bound_contextvars(request_id=request.request_id):
                session = await self.texts.open(request, caller, tokens.reserve)
            if isinstance(session, Refusal):
                yield session
                return
            caller.on_taken(session.prompt_tokens)
            caller.session = session
            with self.sessions.keep(session):
                try:
                    yield session
                finally:
                    caller.on_left(session)
        finally:
            tokens.settle()
            self.admission.release_id(request.tenant, request.request_id)

    def _validate(self, draft: RequestDraft, caller: Caller, new_id: str) -> TextRequest | Refusal:
        model = self.texts.router.model()
        if model is None:
            return check_model(draft.model, self.model_name, ()) or no_engine()
        rules = RequestRules(
            self.model_name,
            model.vocab_size,
            model.max_model_len,
            self.allow_chat_template,
            self.texts.router.adapter_names,
        )
        request = validate_request(draft, rules, new_id=new_id, deadline=caller.deadline)
        return request if isinstance(request, Refusal) else _of_tenant(request, caller.tenant)


@dataclass(slots=True)
class _TokenHold:
    """The tokens that a request may take, from the moment that its prompt is known until its end."""

    quota: Quota
    caller: Caller
    reserved: int = 0

    def reserve(self, prompt_tokens: int, completion_tokens: int) -> Refusal | None:
        refusal = self.quota.reserve(self.caller.tenant, prompt_tokens, completion_tokens)
        if refusal is None:
            self.reserved = prompt_tokens + completion_tokens
        return refusal

    def settle(self) -> None:
        """A request that no engine took has used nothing."""
        used = (self.caller.prompt_tokens or 0) + self.caller.completion_tokens
        self.quota.settle(self.reserved, used)


def _of_tenant(request: TextRequest, tenant: Tenant) -> TextRequest | Refusal:
    """The request with its tenant's name, weight, priority and part of the prefix cache."""
    priority = tenant.resolve_priority(request.options.priority)
    if isinstance(priority, Refusal):
        return priority
    salt = tenant.cache_salt(request.options.cache_salt)
    options = replace(request.options, priority=priority, cache_salt=salt)
    return replace(request, options=options, tenant=tenant.name, weight=tenant.weight)
