"""Turns a draft into a TextRequest, or says which fields are wrong and by how much.

Must not know: grpc, protobuf, how a request is served.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokenizer_service.engines.messages import SamplingOptions
from tokenizer_service.engines.refusal import Refusal, RefusalCode, Violation, invalid
from tokenizer_service.sessions.request import (
    ConversationPrompt,
    GenerationOptions,
    IdsPrompt,
    Prompt,
    RequestDraft,
    TextRequest,
)

MAX_ID_CHARS = 256
MAX_MESSAGES = 4096
MAX_STOPS = 64
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 256
# A hostile request may have thousands of wrong ids; the answer stays small.
MAX_VIOLATIONS = 16


@dataclass(frozen=True, slots=True)
class RequestRules:
    """Limits that depend on what is served."""

    model: str
    vocab_size: int
    max_model_len: int


def validate_request(
    draft: RequestDraft, rules: RequestRules, *, new_id: str, deadline: float | None
) -> TextRequest | Refusal:
    """`new_id` is used when the client chose no request id."""
    refusal = check_model(draft.model, rules.model)
    if refusal is not None:
        return refusal
    violations = tuple(_first(_request_violations(draft, rules), MAX_VIOLATIONS))
    if violations or draft.prompt is None:
        return invalid(violations)
    return TextRequest(
        request_id=draft.request_id or new_id,
        prompt=draft.prompt,
        options=draft.options,
        deadline=deadline,
    )


def check_model(name: str, served: str) -> Refusal | None:
    """Empty is the served model; any other name is NOT_FOUND."""
    if name in ("", served):
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
                yield from _unknown_ids("token_ids.ids", token_ids, rules.vocab_size)
        case ConversationPrompt():
            yield from conversation_violations("messages", prompt)
        case _:
            pass


def too_long(num_tokens: int, max_model_len: int) -> str:
    return (
        f"prompt of {num_tokens:,} tokens exceeds max_model_len {max_model_len:,}"
        f" (at most {max_model_len - 1:,}: one is left for the completion)"
    )


def conversation_violations(field: str, prompt: ConversationPrompt) -> Iterator[Violation]:
    """What is wrong with a conversation whatever the template; `field` is the path of the message list."""
    if prompt.num_messages == 0:
        yield Violation(field, "the conversation is empty; at least 1 message is needed")
    if prompt.num_messages > MAX_MESSAGES:
        yield Violation(field, f"{prompt.num_messages:,} messages exceed the limit of {MAX_MESSAGES:,}")
        return
    for place, message in enumerate(prompt.messages):
        if not message.role:
            yield Violation(f"{field}[{place}].role", "the role is empty")


def _unknown_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> Iterator[Violation]:
    for place, token_id in enumerate(token_ids):
        if not 0 <= token_id < vocab_size:
            yield Violation(f"{field}[{place}]", f"token id {token_id} is outside the vocabulary 0..{vocab_size - 1}")


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
    for violation in _sampling_violations(options.sampling, rules):
        yield Violation(f"options.sampling.{violation.field}", violation.description)


def _sampling_violations(sampling: SamplingOptions, rules: RequestRules) -> Iterator[Violation]:
    if sampling.max_tokens is not None and sampling.max_tokens < 1:
        yield Violation("max_tokens", f"{sampling.max_tokens} is below 1")
    yield from _min_tokens_violations(sampling)
    yield from _outside("temperature", sampling.temperature, 0.0, math.inf)
    if sampling.top_k is not None and sampling.top_k < -1:
        yield Violation("top_k", f"{sampling.top_k} is below -1 (0 and -1 mean off)")
    yield from _outside("top_p", sampling.top_p, 0.0, 1.0, is_low_open=True)
    yield from _outside("min_p", sampling.min_p, 0.0, 1.0)
    ids = sampling.stop_token_ids
    if len(ids) > MAX_STOP_TOKEN_IDS:
        yield Violation("stop_token_ids", f"{len(ids):,} ids exceed the limit of {MAX_STOP_TOKEN_IDS}")
    yield from _unknown_ids("stop_token_ids", ids[:MAX_STOP_TOKEN_IDS], rules.vocab_size)


def _min_tokens_violations(sampling: SamplingOptions) -> Iterator[Violation]:
    low, high = sampling.min_tokens, sampling.max_tokens
    if low is None:
        return
    if low < 0:
        yield Violation("min_tokens", f"{low} is below 0")
    elif high is not None and low > high:
        yield Violation("min_tokens", f"{low} exceeds max_tokens {high}")


def _outside(
    field: str, value: float | None, low: float, high: float, *, is_low_open: bool = False
) -> Iterator[Violation]:
    if value is None:
        return
    above_low = value > low if is_low_open else value >= low
    if not (math.isfinite(value) and above_low and value <= high):
        interval = f"{'(' if is_low_open else '['}{low:g}, {high:g}{')' if math.isinf(high) else ']'}"
        yield Violation(field, f"{value:g} is outside {interval}")
