"""Turns the fields of a generating request into what to generate and how to answer.

Must not know: sockets, engines.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tokenizer_service.engines.messages import SamplingOptions
from tokenizer_service.engines.refusal import Refusal
from tokenizer_service.http.chat import ChatAnswer, ChatStream
from tokenizer_service.http.chat_fields import ChatFields, chat_prompt, chat_sampling
from tokenizer_service.http.completion_fields import (
    CompletionFields,
    CompletionPrompt,
    completion_prompts,
    completion_sampling,
    is_list_of_prompts,
)
from tokenizer_service.http.completions import CompletionAnswer, CompletionOptions, CompletionStream
from tokenizer_service.http.endpoint import MAX_ANSWER_LOGPROBS, Generation, too_many_logprobs
from tokenizer_service.http.errors import FieldNames, HttpError, bad_field, http_error
from tokenizer_service.http.facts import AnswerFacts
from tokenizer_service.http.generation_fields import GenerationFields, SampledFields, generation_options
from tokenizer_service.http.response_fields import RESPONSE_NAMES, ResponseFields, response_prompt, response_sampling
from tokenizer_service.http.responses import ResponseAnswer, ResponseFacts, ResponseStream
from tokenizer_service.sessions.request import GenerationOptions, Prompt, RequestDraft, TextPrompt
from tokenizer_service.sessions.sampling_rules import MAX_BAD_WORD_TOKENS
from tokenizer_service.sessions.text_service import TextService
from tokenizer_service.sessions.validation import MAX_ID_CHARS, check_model


@dataclass(frozen=True, slots=True)
class Readers:
    """`clock` gives Unix seconds. Each method is the `read` of a GenerationEndpoint."""

    texts: TextService
    model_name: str
    new_id: Callable[[], str]
    clock: Callable[[], float]

    async def chat(self, fields: ChatFields, request_id: str) -> Generation | HttpError:
        prompt = chat_prompt(fields)
        sampling = chat_sampling(fields)
        if isinstance(prompt, HttpError) or isinstance(sampling, HttpError):
            return prompt if isinstance(prompt, HttpError) else sampling  # type: ignore[return-value]
        names = sampling[0]
        options = self._check_size(fields, sampling[1], 1, names) or await self._options(fields, sampling[1])
        if isinstance(options, HttpError):
            return options
        drafts = self._drafts(fields, request_id, [prompt], options)
        facts = self._facts("chatcmpl-", fields, drafts, with_logprobs=fields.logprobs)
        if fields.stream:
            return Generation(drafts, lambda _: names, stream=ChatStream(facts))
        return Generation(drafts, lambda _: names, answer=ChatAnswer(facts))

    async def completion(self, fields: CompletionFields, request_id: str) -> Generation | HttpError:
        prompts = completion_prompts(fields)
        sampling = completion_sampling(fields)
        if isinstance(prompts, HttpError) or isinstance(sampling, HttpError):
            return prompts if isinstance(prompts, HttpError) else sampling  # type: ignore[return-value]
        refusal = _check_id_of_many(request_id, len(prompts))
        if refusal is not None:
            return refusal
        names = partial(_prompt_names, sampling[0], is_list_of_prompts(fields.prompt))
        refusal = self._check_size(fields, sampling[1], len(prompts), sampling[0])
        options = refusal or await self._options(fields, sampling[1])
        if isinstance(options, HttpError):
            return options
        echoes = await self._echoes(fields, prompts, names)
        if isinstance(echoes, HttpError):
            return echoes
        drafts = self._drafts(fields, request_id, prompts, options)
        facts = self._facts("cmpl-", fields, drafts, with_logprobs=fields.logprobs is not None)
        shape = CompletionOptions(echoes, with_prompt_logprobs=fields.prompt_logprobs is not None)
        if fields.stream:
            return Generation(drafts, names, stream=CompletionStream(facts, shape))
        return Generation(drafts, names, answer=CompletionAnswer(facts, shape))

    async def response(self, fields: ResponseFields, request_id: str) -> Generation | HttpError:
        prompt = response_prompt(fields)
        if isinstance(prompt, HttpError):
            return prompt
        options = await self._options(fields, response_sampling(fields))
        if isinstance(options, HttpError):
            return options
        drafts = self._drafts(fields, request_id, [prompt], options)
        facts = ResponseFacts(drafts[0].request_id, int(self.clock()), fields.model or self.model_name, fields)
        if fields.stream:
            return Generation(drafts, lambda _: RESPONSE_NAMES, stream=ResponseStream(facts))
        return Generation(drafts, lambda _: RESPONSE_NAMES, answer=ResponseAnswer(facts))

    def _check_size(
        self, fields: GenerationFields, sampling: SamplingOptions, num_prompts: int, names: FieldNames
    ) -> HttpError | None:
        """Whether an answer that is not streamed would have too many log probabilities, as far as that is asked for."""
        model = self.texts.router.model()
        if fields.stream or sampling.logprobs is None or sampling.max_tokens is None or model is None:
            return None
        tokens = max(0, min(sampling.max_tokens, model.max_model_len)) * (sampling.n or 1) * num_prompts
        count = tokens * (1 + sampling.logprobs)
        return http_error(too_many_logprobs(count), names) if count > MAX_ANSWER_LOGPROBS else None

    async def _options(self, fields: GenerationFields, sampling: SamplingOptions) -> GenerationOptions | HttpError:
        """Words that may not come are encoded here: the engine knows tokens only."""
        refusal = check_model(fields.model, self.model_name, self.texts.router.adapter_names)
        if refusal is not None:
            return http_error(refusal, FieldNames())
        bad_words = list[tuple[int, ...]]()
        for place, word in enumerate(fields.bad_words or ()):
            # In the middle of a text most tokenizers write a word with the space before it.
            for form in dict.fromkeys((word, f" {word.lstrip()}")):
                ids = await self.texts.tokenize(TextPrompt(form, add_special_tokens=False), tuple)
                if isinstance(ids, Refusal):
                    return http_error(ids, FieldNames({"text": f"bad_words[{place}]"}))
                if not 1 <= len(ids) <= MAX_BAD_WORD_TOKENS:
                    return bad_field(f"bad_words[{place}]", f"{len(ids):,} tokens are outside 1..{MAX_BAD_WORD_TOKENS}")
                bad_words.append(ids)
        return generation_options(fields, sampling, tuple(dict.fromkeys(bad_words)))

    async def _echoes(
        self, fields: CompletionFields, prompts: Sequence[CompletionPrompt], names: Callable[[int], FieldNames]
    ) -> list[str] | HttpError | None:
        if not fields.echo:
            return None
        if fields.stream and fields.logprobs is not None and (fields.n or 1) > 1:
            return bad_field("echo", "with stream and logprobs n must be 1")
        texts = list[str]()
        for place, prompt in enumerate(prompts):
            text = await self._text(prompt, fields.skip_special_tokens)
            if isinstance(text, Refusal):
                return http_error(text, names(place))
            texts.append(text)
        return texts

    async def _text(self, prompt: CompletionPrompt, skip_special_tokens: bool) -> str | Refusal:
        if isinstance(prompt, TextPrompt):
            return prompt.text
        return await self.texts.detokenize(prompt.token_ids, skip_special_tokens, str)

    def _drafts(
        self, fields: GenerationFields, request_id: str, prompts: Sequence[Prompt], options: GenerationOptions
    ) -> list[RequestDraft]:
        """Of several prompts each has an id of its own, made from the request's."""
        base = request_id or self.new_id()
        ids = [base] if len(prompts) == 1 else [f"{base}-{place}" for place in range(len(prompts))]
        return [RequestDraft(fields.model, ids[place], prompt, options) for place, prompt in enumerate(prompts)]

    def _facts(
        self, prefix: str, fields: SampledFields, drafts: Sequence[RequestDraft], *, with_logprobs: bool
    ) -> AnswerFacts:
        base = drafts[0].request_id
        usage = fields.stream_options
        return AnswerFacts(
            id=prefix + (base if len(drafts) == 1 else base.rsplit("-", 1)[0]),
            created=int(self.clock()),
            model=fields.model or self.model_name,
            n=fields.n or 1,
            include_usage=usage is not None and bool(usage.include_usage or usage.continuous_usage_stats),
            continuous_usage=usage is not None and bool(usage.continuous_usage_stats),
            with_logprobs=with_logprobs,
            with_token_ids=fields.return_token_ids,
        )


def _check_id_of_many(request_id: str, num_prompts: int) -> HttpError | None:
    """The ids of the single prompts have to fit too."""
    longest = MAX_ID_CHARS - (0 if num_prompts == 1 else len(f"-{num_prompts - 1}"))
    if len(request_id) <= longest:
        return None
    text = f"{len(request_id)} characters exceed the limit of {longest} with {num_prompts} prompts, which are numbered"
    return bad_field("X-Request-Id", text)


def _prompt_names(names: FieldNames, is_list: bool, place: int) -> FieldNames:
    """Both kinds of prompt are `prompt` here, or one of its entries."""
    path = f"prompt[{place}]" if is_list else "prompt"
    return names.beside({"text": path, "token_ids.ids": path, "token_ids": path, "prompt": path})
