"""What the service does with text: opens generations, tokenizes, detokenizes.

Must not know: grpc, protobuf, how engines are reached.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import structlog

from service_runtime.tracing import Span, trace_id_of
from tokenizer_service.engines.messages import ModelInfo, SamplingOptions, TokenSubmission
from tokenizer_service.engines.refusal import (
    Refusal,
    RefusalCode,
    deadline_passed,
    invalid_field,
)
from tokenizer_service.failover.failover import Failover
from tokenizer_service.routing.router import Router, no_engine
from tokenizer_service.sessions.assembler import Assembler, TextAssembler
from tokenizer_service.sessions.encode_pool import EncodePool
from tokenizer_service.sessions.prompt_text import PromptEncoder, PromptRefused
from tokenizer_service.sessions.request import GenerationOptions, IdsPrompt, Prompt, TextRequest
from tokenizer_service.sessions.session import ReadLimits, SessionFacts, SessionObserver, TextSession
from tokenizer_service.sessions.tool_use import ToolUse, in_words_of_tools, tool_use
from tokenizer_service.sessions.validation import too_long
from tokenizer_service.text.stop_strings import StopStrings
from tokenizer_service.text.tool_formats import call_id

_log = structlog.get_logger()
T = TypeVar("T")


class RequestObserver(SessionObserver, Protocol):
    """Told about the way of a request to its session, too. `span` is the request's."""

    @property
    def span(self) -> Span: ...

    def on_stage(self, name: str) -> None:
        """A stage that began where the one before ended is over."""

    def watched(self, assembler: Assembler) -> Assembler:
        """The assembler, or one around it that takes its time."""
        ...


Reserve = Callable[[int, int], Refusal | None]
"""Is told the tokens of the prompt and those that may be generated; says whether the client may have them."""


@dataclass(frozen=True, slots=True)
class TextService:
    """`new_seed` gives 63 random bits, for requests without a seed and for ids of tool calls; `observe_encode` is
    told seconds per prompt.
    """

    encoder: PromptEncoder
    pool: EncodePool
    router: Router
    failover: Failover
    read_limits: ReadLimits
    new_seed: Callable[[], int]
    observe_encode: Callable[[float], None]

    async def open(self, request: TextRequest, observer: RequestObserver, reserve: Reserve) -> TextSession | Refusal:
        """Encodes the prompt and hands the request to an engine. The caller must close the session."""
        model = self.router.model()
        if model is None:
            return no_engine()
        try:
            async with asyncio.timeout_at(request.deadline):
                token_ids = await self.encode(request.prompt, model)
        except TimeoutError:
            return deadline_passed()
        if isinstance(token_ids, Refusal):
            return token_ids
        observer.on_stage("encode")
        refusal = check_length(request.prompt.FIELD, len(token_ids), model) or reserve(
            len(token_ids), _most_tokens(request.options.sampling, len(token_ids), model)
        )
        return refusal or self._start(request, token_ids, model, observer)

    async def encode(self, prompt: Prompt, model: ModelInfo) -> list[int] | Refusal:
        """The ids of a prompt; a text that can never fit the model's context is refused unencoded."""
        if isinstance(prompt, IdsPrompt):
            return list(prompt.token_ids)
        return await self._work(partial(self.encoder.encode, prompt, model), timed=True)

    async def tokenize(self, prompt: Prompt, then: Callable[[list[int]], T]) -> T | Refusal:
        """`then` of the ids, both in a thread; a text of any length."""
        return await self._work(lambda: then(self.encoder.encode(prompt, None)), timed=True)

    async def detokenize(
        self, token_ids: Sequence[int], skip_special_tokens: bool, then: Callable[[str], T]
    ) -> T | Refusal:
        """`then` of the text, both in a thread."""
        return await self._work(lambda: then(self.encoder.decode(token_ids, skip_special_tokens)))

    async def _work(self, function: Callable[[], T], *, timed: bool = False) -> T | Refusal:
        """Runs in the pool; a client's mistake and the tokenizer's own failure both come back as refusals."""
        started = asyncio.get_running_loop().time()
        try:
            result = await self.pool.run(function)
        except PromptRefused as error:
            return error.refusal
        except Exception:
            _log.exception("encoding_failed")
            return Refusal(RefusalCode.INTERNAL, "the tokenizer failed on this request")
        if timed:
            self.observe_encode(asyncio.get_running_loop().time() - started)
        return result

    def _start(
        self, request: TextRequest, token_ids: list[int], model: ModelInfo, observer: RequestObserver
    ) -> TextSession | Refusal:
        options = request.options
        seed = self.new_seed() if options.sampling.seed is None else options.sampling.seed
        tools = tool_use(request.prompt, options.sampling, self.encoder.tool_format)
        constraint = tools.constraint if tools is not None else None
        structure = constraint or options.sampling.structured_output
        sampling = replace(
            options.sampling.with_defaults(model.default_sampling), seed=seed, structured_output=structure
        )
        facts = SessionFacts(
            request_id=request.request_id,
            prompt_tokens=len(token_ids),
            seed=seed,
            deadline=request.deadline,
            include_stop=options.include_stop,
            hidden_stop_reasons=model.eos_token_ids - frozenset(sampling.stop_token_ids),
            reword=in_words_of_tools if constraint is not None else None,
            trace_fields=trace_id_of(observer.span),
        )
        try:
            assemblers = [
                observer.watched(self._assembler(options, token_ids, tools)) for _ in range(sampling.num_samples)
            ]
        except Exception:
            _log.exception("detokenizer_failed", request_id=request.request_id)
            return Refusal(RefusalCode.INTERNAL, "the tokenizer failed on this request")
        session = TextSession(facts, assemblers, self.read_limits, observer, self.encoder.token_bytes)
        submission = TokenSubmission(
            request_id=request.request_id,
            token_ids=token_ids,
            sampling=sampling,
            deadline=request.deadline,
            cache_salt=options.cache_salt,
            priority=options.priority,
            tenant=request.tenant,
            weight=request.weight,
            adapter=request.adapter,
            adapter_fingerprint=(self.router.fingerprint(request.adapter) or "") if request.adapter else "",
            span=observer.span,
        )
        refusal = session.start(partial(self.failover.submit, submission))
        observer.on_stage("route")
        return refusal or session

    def _assembler(self, options: GenerationOptions, prompt_ids: list[int], tools: ToolUse | None) -> TextAssembler:
        """Of one sample."""
        shown_ids = frozenset[int]() if tools is None else self.encoder.tool_marker_ids
        detokenizer = self.encoder.new_detokenizer(prompt_ids, options.skip_special_tokens, shown_ids)
        stops = StopStrings(options.stops, include=options.include_stop) if options.stops else None
        return TextAssembler(detokenizer, stops, None if tools is None else tools.new_parser(self._new_call_id))

    def _new_call_id(self) -> str:
        return call_id(self.encoder.tool_format, self.new_seed())


def _most_tokens(sampling: SamplingOptions, prompt_tokens: int, model: ModelInfo) -> int:
    """That may be generated, all samples together."""
    room = model.max_model_len - prompt_tokens
    return sampling.num_samples * (room if sampling.max_tokens is None else min(sampling.max_tokens, room))


def check_length(field: str, num_tokens: int, model: ModelInfo) -> Refusal | None:
    """A prompt has at least one token and leaves room for one."""
    if num_tokens == 0:
        return invalid_field(field, "the prompt is empty; at least 1 token is needed")
    if num_tokens < model.max_model_len:
        return None
    return invalid_field(field, too_long(num_tokens, model.max_model_len))
