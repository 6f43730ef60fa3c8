"""The request of POST /v1/completions and the prompts that it means.

Must not know: how requests are served.
"""

from typing import Any

from tokenizer_service.engines.messages import SamplingOptions
from tokenizer_service.http.errors import FieldNames, HttpError, bad_field
from tokenizer_service.http.fields import Int64
from tokenizer_service.http.generation_fields import SampledFields, check_sampled
from tokenizer_service.http.structured_fields import structured_output
from tokenizer_service.sessions.request import IdsPrompt, TextPrompt

MAX_PROMPTS = 64
CompletionPrompt = TextPrompt | IdsPrompt
_NAMES = FieldNames({"request_id": "X-Request-Id"})


class CompletionFields(SampledFields):
    prompt: Any
    max_tokens: Int64 | None = 16
    echo: bool = False
    logprobs: Int64 | None = None
    suffix: str | None = None
    add_special_tokens: bool = True


def completion_prompts(fields: CompletionFields) -> list[CompletionPrompt] | HttpError:
    """One for each string or list of token ids, in the client's order."""
    refusal = check_sampled(fields)
    if refusal is None and fields.suffix is not None:
        refusal = bad_field("suffix", "is not supported")
    return refusal or _prompts(fields.prompt, fields.add_special_tokens)


def is_list_of_prompts(prompt: Any) -> bool:
    return isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt)


def _prompts(prompt: Any, add_special_tokens: bool) -> list[CompletionPrompt] | HttpError:
    if not is_list_of_prompts(prompt):
        single = _prompt("prompt", prompt, add_special_tokens)
        return single if isinstance(single, HttpError) else [single]
    if len(prompt) > MAX_PROMPTS:
        return bad_field("prompt", f"{len(prompt):,} prompts exceed the limit of {MAX_PROMPTS}")
    prompts = []
    for place, part in enumerate(prompt):
        made = _prompt(f"prompt[{place}]", part, add_special_tokens)
        if isinstance(made, HttpError):
            return made
        prompts.append(made)
    return prompts


def _prompt(param: str, given: Any, add_special_tokens: bool) -> CompletionPrompt | HttpError:
    if isinstance(given, str):
        return TextPrompt(given, add_special_tokens)
    if not isinstance(given, list):
        return bad_field(param, "must be a string or a list of token ids")
    if set(map(type, given)) - {int}:
        place = next(place for place, token_id in enumerate(given) if type(token_id) is not int)
        return bad_field(f"{param}[{place}]", "must be a token id")
    return IdsPrompt(tuple(given))


def completion_sampling(fields: CompletionFields) -> tuple[FieldNames, SamplingOptions] | HttpError:
    """The API's own names of the fields, and the values of those that it names in its own way."""
    structure = structured_output(fields)
    if isinstance(structure, HttpError):
        return structure
    echoed = fields.logprobs if fields.echo else None
    return _NAMES.with_structure(structure[0]), SamplingOptions(
        max_tokens=fields.max_tokens,
        logprobs=fields.logprobs,
        prompt_logprobs=echoed if fields.prompt_logprobs is None else fields.prompt_logprobs,
        n=fields.n,
        structured_output=structure[1],
    )
