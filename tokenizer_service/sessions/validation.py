"""Turns a draft into a TextRequest, or says which fields are wrong and by how much.

Must not know: grpc, protobuf, how a request is served.
"""

from collections.abc import Container, Iterator
from dataclasses import dataclass

from tokenizer_service.engines.refusal import Refusal, RefusalCode, Violation, invalid
from tokenizer_service.sessions.conversation_rules import conversation_violations
from tokenizer_service.sessions.request import (
    ConversationPrompt,
    GenerationOptions,
    IdsPrompt,
    Prompt,
    RequestDraft,
    TextRequest,
)
from tokenizer_service.sessions.sampling_rules import sampling_violations, unknown_ids
from tokenizer_service.sessions.tool_use import forced_call_violations

MAX_ID_CHARS = 256
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
# A hostile request may have thousands of wrong ids; the answer stays small.
MAX_VIOLATIONS = 16


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Limits that depend on what is served, and on the operator: may a request bring its own chat template?"""

    model: str
    vocab_size: int
    max_model_len: int
    allow_chat_template: bool = False
    adapters: Container[str] = ()


def validate_request(
    draft: RequestDraft, rules: RequestRules, *, new_id: str, deadline: float | None
) -> TextRequest | Refusal:
    """`new_id` is used when the client chose no request id."""
    refusal = check_model(draft.model, rules.model, rules.adapters)
    if refusal is not None:
        return refusal
    violations = tuple(_first(_request_violations(draft, rules), MAX_VIOLATIONS))
    if not violations and isinstance(draft.prompt, ConversationPrompt):
        violations = tuple(forced_call_violations(draft.prompt, draft.options.sampling))
    if violations or draft.prompt is None:
        return invalid(violations)
    return TextRequest(
        request_id=draft.request_id or new_id,
        prompt=draft.prompt,
        options=draft.options,
        deadline=deadline,
        adapter="" if draft.model == rules.model else draft.model,
    )


def check_model(name: str, served: str, adapters: Container[str]) -> Refusal | None:
    """Empty is the served model; a name that is neither its nor an adapter's is NOT_FOUND."""
    if name in ("", served) or name in adapters:
        return None
    return Refusal(RefusalCode.NOT_FOUND, f"model {name[:MAX_ID_CHARS]!r} is not served here, {served!r} is")


def _first(violations: Iterator[Violation], count: int) -> Iterator[Violation]:
    for _, violation in zip(range(count), violations, strict=False):
        yield violation


def _request_violations(draft: RequestDraft, rules: RequestRules) -> Iterator[Violation]:
    yield from draft.misplaced
    yield from _too_long("request_id", draft.request_id)
    yield from _prompt_violations(draft.prompt, rules)
    yield from _option_violations(draft.options, rules)


def _too_long(field: str, text: str) -> Iterator[Violation]:
    if len(text) > MAX_ID_CHARS:
        yield Violation(field, f"{len(text):,} characters exceed the limit of {MAX_ID_CHARS}")


def _prompt_violations(prompt: Prompt | None, rules: RequestRules) -> Iterator[Violation]:
    match prompt:
        case None:
            yield Violation("prompt", "no prompt is given: set one of text and token_ids")
        case IdsPrompt(token_ids):
            if not token_ids:
                yield Violation("token_ids.ids", "the prompt is empty; at least 1 token is needed")
            elif len(token_ids) >= rules.max_model_len:
                yield Violation("token_ids.ids", too_long(len(token_ids), rules.max_model_len))
            else:
                yield from unknown_ids("token_ids.ids", token_ids, rules.vocab_size)
        case ConversationPrompt():
            yield from conversation_violations(prompt, allow_chat_template=rules.allow_chat_template)
        case _:
            pass


def too_long(num_tokens: int, max_model_len: int) -> str:
    return (
        f"prompt of {num_tokens:,} tokens exceeds max_model_len {max_model_len:,}"
        f" (at most {max_model_len - 1:,}: one is left for the completion)"
    )


def _option_violations(options: GenerationOptions, rules: RequestRules) -> Iterator[Violation]:
    num_stops = len(options.stops)
    if num_stops > MAX_STOPS:
        yield Violation("options.stop", f"{num_stops:,} stop strings exceed the limit of {MAX_STOPS}")
    for place, stop in enumerate(options.stops[:MAX_STOPS]):
        if not stop:
            yield Violation(f"options.stop[{place}]", "a stop string may not be empty")
        elif len(stop) > MAX_STOP_CHARS:
            yield Violation(
                f"options.stop[{place}]",
                f"{len(stop):,} characters exceed the limit of {MAX_STOP_CHARS:,}",
            )
    yield from _too_long("options.cache_salt", options.cache_salt or "")
    for violation in sampling_violations(options.sampling, rules.vocab_size):
        yield Violation(f"options.sampling.{violation.field}", violation.description)
