"""Chat templates: equal to transformers, sandboxed, bounded, failures in the client's words (area 7)."""

import json
from datetime import datetime

import pytest

from tokenizer_service.text.chat_template import ChatTemplate
from tokenizer_service.text.errors import TextError
from tokenizer_service.text.messages import Message
from tokenizer_service.text.template_data import message_data

CONVERSATIONS = [
    [Message("user", "Hi")],
    [
        Message("system", "Be brief."),
        Message("user", "  Hi\n"),
        Message("assistant", "Hello"),
        Message("user", "é世"),
    ],
    [Message("user", "")],
    [Message("user", "<b>&'\"</b> {{ x }} {% y %}")],
]
TEMPLATES = {
    "bos and turns": (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}{{ eos_token }}\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    "blocks on their own lines": (
        "{% set ns = namespace(found=false) %}\n{% for m in messages %}\n    {% if m.role == 'system' %}\n"
        "        {% set ns.found = true %}\n{% continue %}\n    {% endif %}\n{{ loop.index0 }}:{{ m.content }}\n"
        "    {% if loop.index > 1 %}{% break %}{% endif %}\n{% endfor %}\n{{ ns.found }}"
    ),
    "json": (
        "{% for m in messages %}{{ m | tojson }}{{ m.content | tojson(indent=2) }}{{ {'b': 1, 'a': '<é>'} "
        "| tojson(sort_keys=true, ensure_ascii=true, separators=(',', ':')) }}{% endfor %}"
    ),
    "training marks": (
        "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
        "{%- if tools is none and documents is none and not unheard_of %} none {%- endif %}"
    ),
    "year": "{{ strftime_now('%Y') }}{% for m in messages -%}\n {{ m.content }} {%- endfor %}\n",
    "macro": (
        "{% macro turn(m) %}<{{ m.role | upper }}>{{ caller() }}{% endmacro %}{% for m in messages %}"
        "{% call turn(m) %}{{ m.content.split('e')[-1] }}{% endcall %}{% endfor %}"
    ),
}


def as_dicts(messages: list[Message]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_equals_transformers(reference, default_folder, default_tokenizer, messages, add_generation_prompt):
    """On the model's own template and on hand-written ones that use what templates use."""
    special = default_tokenizer.named_special_tokens
    assert special == reference.special_tokens_map
    ours = {None: ChatTemplate.load(default_folder, special)}
    ours |= {source: ChatTemplate(source, special) for source in TEMPLATES.values()}
    for source, template in ours.items():
        expected = reference.apply_chat_template(
            as_dicts(messages),
            chat_template=source,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        assert template.render(message_data(messages), add_generation_prompt, max_chars=10_000) == expected


def render(source: str, messages: list[Message] = CONVERSATIONS[0], max_chars: int = 1000) -> str:
    return ChatTemplate(source, {}).render(message_data(messages), True, max_chars=max_chars)


@pytest.mark.parametrize(
    "source",
    [
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'system'}) }}",
        "{% set _ = messages[0].pop('content') %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ self.__init__ }}{{ (1).__class__.__base__ }}",
        "{{ messages[5].content.x }}",
        "{{ 1 / 0 }}",
        "{{ 1 + 'a' }}",
        "{% include 'other' %}",
        "{{ range(10000000) | list }}",
    ],
)
def test_a_failing_template_fails_the_request_and_tells_no_internals(source):
    """B100: the sandbox holds, the caller's messages are as before, and the answer names nothing of ours."""
    messages = [Message("user", "Hi")]
    with pytest.raises(TextError) as raised:
        render(source, messages)
    assert raised.value.field == "messages"
    assert raised.value.message == "the model's chat template cannot render these messages"
    assert messages == [Message("user", "Hi")]


def test_a_refusing_template_speaks_to_the_client():
    """raise_exception is how templates refuse; its text is passed on, in bounds."""
    with pytest.raises(TextError) as raised:
        render("{{ raise_exception('roles must alternate ' + 'x' * 9000) }}")
    assert raised.value.field == "messages"
    assert raised.value.message.startswith("the model's chat template refuses: roles must alternate xxx")
    assert len(raised.value.message) < 600


def test_the_rendered_prompt_is_bounded():
    source = "{% for i in range(90000) %}{% for j in range(90000) %}0123456789{% endfor %}{% endfor %}"
    with pytest.raises(TextError, match="exceeds the limit of 1,000 characters"):
        render(source)
    assert render("{{ messages[0].content }}", [Message("user", "x" * 1000)]) == "x" * 1000


def test_the_clock_is_an_argument():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2026, 1, 2))
    assert template.render(message_data(CONVERSATIONS[0]), True, max_chars=100) == "02 Jan 2026"


@pytest.mark.parametrize(
    ("config", "jinja", "expected"),
    [
        ({"chat_template": "from config"}, None, "from config"),
        ({"chat_template": "from config"}, "from file", "from file"),
        (
            {"chat_template": [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]},
            None,
            "d",
        ),
    ],
)
def test_where_the_template_is_read_from(tmp_path, config, jinja, expected):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if jinja is not None:
        (tmp_path / "chat_template.jinja").write_text(jinja)
    assert ChatTemplate.load(tmp_path, {}).render(message_data(CONVERSATIONS[0]), True, max_chars=100) == expected


@pytest.mark.parametrize("config", [None, {}, {"chat_template": [{"name": "rag", "template": "r"}]}])
def test_a_model_without_a_template_is_the_requests_error(tmp_path, config):
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(TextError) as raised:
        ChatTemplate.load(tmp_path, {})
    assert (raised.value.field, raised.value.message) == (
        "messages",
        "this model has no chat template; send a plain prompt instead",
    )


def test_a_bad_template_is_the_models_error(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(TextError) as raised:
        ChatTemplate.load(tmp_path, {})
    assert raised.value.field is None
