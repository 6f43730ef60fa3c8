"""What the tables of the contract tests cannot show: rules that depend on the operator, and bounded answers."""

from dataclasses import replace

import pytest

from tokenizer_service.engines.messages import JsonSchema, SamplingOptions
from tokenizer_service.engines.refusal import Refusal, RefusalCode
from tokenizer_service.sessions.conversation_rules import MAX_TEMPLATE_CHARS, conversation_violations
from tokenizer_service.sessions.request import ConversationPrompt, GenerationOptions, IdsPrompt, RequestDraft
from tokenizer_service.sessions.validation import MAX_VIOLATIONS, RequestRules, validate_request
from tokenizer_service.text.messages import Message, Tool

PROMPT = ConversationPrompt((Message("user", "a"),), 1, True)
RULES = RequestRules("m", vocab_size=100, max_model_len=50)
OPTIONS = GenerationOptions(SamplingOptions(), (), False, True, None)
DRAFT = RequestDraft("", "", IdsPrompt((1,)), OPTIONS)


@pytest.mark.parametrize(
    ("size", "allowed", "words"),
    [
        (1, False, "not allowed"),
        (1, True, None),
        (MAX_TEMPLATE_CHARS, True, None),
        (MAX_TEMPLATE_CHARS + 1, True, "65,537"),
        (MAX_TEMPLATE_CHARS + 1, False, "not allowed"),
    ],
)
def test_a_template_of_the_request_s_own_is_the_operator_s_choice(size: int, allowed: bool, words: str | None) -> None:
    prompt = replace(PROMPT, chat_template="x" * size)
    violations = list(conversation_violations(prompt, allow_chat_template=allowed))
    assert [violation.field for violation in violations] == ([] if words is None else ["chat_template"])
    assert all(words is not None and words in violation.description for violation in violations)
    draft = replace(DRAFT, prompt=prompt)
    rules = replace(RULES, allow_chat_template=allowed)
    assert isinstance(validate_request(draft, rules, new_id="r", deadline=None), Refusal) == (words is not None)


def test_a_hostile_request_gets_a_small_answer() -> None:
    sampling = SamplingOptions(
        allowed_token_ids=(7_000,) * 90,
        banned_token_ids=(-1,) * 90,
        logit_bias=tuple((1000 + place, 1e9) for place in range(500)),
        bad_words=((),) * 200,
        structured_output=JsonSchema(""),
    )
    draft = replace(DRAFT, options=replace(OPTIONS, sampling=sampling))
    refusal = validate_request(draft, RULES, new_id="r", deadline=None)
    assert isinstance(refusal, Refusal)
    assert refusal.code is RefusalCode.INVALID_ARGUMENT
    assert len(refusal.violations) == MAX_VIOLATIONS
    assert len(refusal.message) < 300


def test_deeply_nested_parameters_are_refused_in_words() -> None:
    for schema in ('{"a":' + "[" * 65_000, '{"a":' * 10_000 + "1" + "}" * 10_000):
        prompt = replace(PROMPT, tools=(Tool("f", None, schema),))
        [violation] = conversation_violations(prompt, allow_chat_template=False, prefix="conversation.")
        assert violation.field == "conversation.tools[0].parameters"
        assert "JSON" in violation.description
        assert len(violation.description) <= 200
