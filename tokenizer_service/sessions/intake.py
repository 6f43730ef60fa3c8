"""Takes a generation request in: checks its draft, claims its id, opens its session. The same for every transport.

Must not know: grpc, protobuf, HTTP, how events are delivered.
"""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.engines.router import no_engine
from tokenizer_service.sessions.admission import Admission
from tokenizer_service.sessions.live import LiveSessions
from tokenizer_service.sessions.request import RequestDraft, TextRequest
from tokenizer_service.sessions.session import SessionObserver, TextSession
from tokenizer_service.sessions.text_service import TextService
from tokenizer_service.sessions.validation import RequestRules, check_model, validate_request


class Caller(SessionObserver, Protocol):
    """Who asks: told what the request is called and how long its prompt is, as soon as that is known.

    `deadline` is a reading of the event loop's clock (seconds), None for no deadline.
    """

    deadline: float | None
    request_id: str
    prompt_tokens: int | None


@dataclass(frozen=True, slots=True)
class Intake:
    """`model_name` is the only one served; `new_id` makes ids for requests that have none.

    `allow_chat_template`: a request may bring its own.
    """

    texts: TextService
    admission: Admission
    sessions: LiveSessions
    model_name: str
    new_id: Callable[[], str]
    allow_chat_template: bool = False

    @asynccontextmanager
    async def open(self, draft: RequestDraft, caller: Caller) -> AsyncIterator[TextSession | Refusal]:
        """The session of the draft, closed after the block, or why there is none. Its id is taken until then."""
        request = self._validate(draft, caller.deadline)
        if isinstance(request, Refusal):
            yield request
            return
        caller.request_id = request.request_id
        refusal = self.admission.claim_id(request.request_id)
        if refusal is not None:
            yield refusal
            return
        try:
            session = await self.texts.open(request, caller)
            if isinstance(session, Refusal):
                yield session
                return
            caller.prompt_tokens = session.prompt_tokens
            with self.sessions.keep(session):
                yield session
        finally:
            self.admission.release_id(request.request_id)

    def _validate(self, draft: RequestDraft, deadline: float | None) -> TextRequest | Refusal:
        model = self.texts.router.model()
        if model is None:
            return check_model(draft.model, self.model_name) or no_engine()
        rules = RequestRules(self.model_name, model.vocab_size, model.max_model_len, self.allow_chat_template)
        return validate_request(draft, rules, new_id=self.new_id(), deadline=deadline)
