"""Tools, calls and results in prompts: equal to transformers where the template knows them, written out where not."""

import json
from typing import Any

import pytest

from tests.fixtures.chat_templates import LLAMA3_LIKE, MISTRAL_LIKE, QWEN_LIKE, WITH_TOOLS
from tests.fixtures.tokenizers_made import SPECIAL_NAMES, msp_tokenizer
from tokenizer_service.text.chat_template import ChatTemplate
from tokenizer_service.text.errors import TextError
from tokenizer_service.text.messages import Message, Tool, ToolCall
from tokenizer_service.text.prompt import ChatLimits, ChatPrompts
from tokenizer_service.text.tokenizer import TextTokenizer
from tokenizer_service.text.tool_formats import ToolFormat

LIMITS = ChatLimits(max_messages=100, max_chars=100_000)
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "enum": ["Paris", "Zürich"]}}, "required": []}
TOOLS = [
    Tool("get_weather", "Weather of a <city>", json.dumps(SCHEMA)),
    Tool("now", None, '{"type": "object", "properties": {}}'),
]
TOOLS_AS_SENT: list[Any] = [
    {
        "type": "function",
        "function": {"name": "get_weather", "description": "Weather of a <city>", "parameters": SCHEMA},
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}},
]
CALL = ToolCall("abcdef123", "get_weather", '{"city": "Zürich", "n": 1.5}')
TURNS = [
    Message("system", "Be brief."),
    Message("user", "Weather?"),
    Message("assistant", "", (CALL,)),
    Message("tool", '{"sky": "gräu"}', tool_call_id="abcdef123", name="get_weather"),
    Message("user", "And now?"),
]


def as_sent(messages: list[Message]) -> list[dict[str, Any]]:
    sent = list[dict[str, Any]]()
    for turn in messages:
        data: dict[str, Any] = {"role": turn.role, "content": turn.content}
        data |= {"name": turn.name} if turn.name else {}
        data |= {"tool_call_id": turn.tool_call_id} if turn.tool_call_id else {}
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(call.arguments)},
            }
            for call in turn.tool_calls
        ]
        sent.append(data | ({"tool_calls": calls} if calls else {}))
    return sent


def prompts(tokenizer: TextTokenizer, template: str, tool_format: ToolFormat | None = None) -> ChatPrompts:
    compiled = ChatTemplate(template, tokenizer.named_special_tokens)
    return ChatPrompts(tokenizer, compiled, LIMITS, tool_format=tool_format)


@pytest.mark.parametrize("tools", [TOOLS, []])
@pytest.mark.parametrize("name", sorted(WITH_TOOLS))
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_ids_equal_transformers(reference, default_tokenizer, name, tools, count):
    """Also an assistant's turn of calls alone (B103), and arguments that came as a string."""
    template = WITH_TOOLS[name]
    expected = reference.apply_chat_template(
        as_sent(TURNS[:count]), tools=TOOLS_AS_SENT if tools else None, chat_template=template, tokenize=True,
        add_generation_prompt=True,
    )["input_ids"]  # fmt: skip
    ours = prompts(default_tokenizer, template)
    assert ours.encode(TURNS[:count], True, tools=tools) == expected
    own = prompts(default_tokenizer, "{{ messages[0].content }}")
    assert own.encode(TURNS[:count], True, tools=tools, chat_template=template) == expected


@pytest.mark.parametrize("name", [None, *sorted(WITH_TOOLS)])
@pytest.mark.parametrize("content", ["The sky is", "The sky is  \n", "", "  ", "é🌶", "a CONTINUE b"])
def test_continuing_equals_transformers(reference, default_folder, default_tokenizer, name, content):
    template = WITH_TOOLS.get(name)
    messages = [*TURNS[:2], Message("assistant", content)]
    try:
        expected = reference.apply_chat_template(
            as_sent(messages), chat_template=template, tokenize=True, continue_final_message=True
        )["input_ids"]
    except ValueError:
        pytest.skip("transformers finds no place to go on")
    if template is None:
        ours = ChatPrompts.load(default_folder, default_tokenizer, LIMITS)
    else:
        ours = prompts(default_tokenizer, template)
    assert ours.encode(messages, False, continue_final_message=True) == expected


def test_a_final_message_that_is_not_shown_cannot_be_continued(default_tokenizer):
    ours = prompts(default_tokenizer, "{{ messages[0].content }}")
    with pytest.raises(TextError) as raised:
        ours.encode([Message("user", "a"), Message("assistant", "b")], False, continue_final_message=True)
    assert raised.value.field == "continue_final_message"


def test_a_template_without_tools_gets_them_written(default_folder, default_tokenizer):
    """The default model's: nothing vanishes (B103), neighbouring results share a turn."""
    ours = ChatPrompts.load(default_folder, default_tokenizer, LIMITS)
    assert ours.tool_format is ToolFormat.HERMES
    results = [*TURNS[:4], Message("tool", "2"), *TURNS[4:]]
    text = default_tokenizer.decode(ours.encode(results, True, tools=TOOLS), False)
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in TOOLS_AS_SENT)
    assert text.startswith("<|im_start|>system\nBe brief.\n\n")
    assert f"<tools>\n{lines}\n</tools>" in text
    call = '{"name": "get_weather", "arguments": {"city": "Zürich", "n": 1.5}}'
    assert f"<|im_start|>assistant\n<tool_call>\n{call}\n</tool_call><|im_end|>" in text
    answers = '<tool_response>\n{"sky": "gräu"}\n</tool_response>\n<tool_response>\n2\n</tool_response>'
    assert f"<|im_start|>user\n{answers}<|im_end|>" in text
    none = ChatPrompts.load(default_folder, default_tokenizer, LIMITS, tool_format=ToolFormat.NONE)
    with pytest.raises(TextError, match="takes no tools"):
        none.encode(TURNS, True, tools=TOOLS)


@pytest.mark.parametrize(
    "template", [None, QWEN_LIKE, "{{ tools | tojson(ensure_ascii=true) }}{{ messages | tojson }}"]
)
def test_special_text_in_tools_and_arguments_stays_text(default_folder, default_tokenizer, template):
    """B105 for everything that a client can write: also keys, escapes in JSON, and text cut by the JSON around it."""
    source = template or (default_folder / "chat_template.jinja").read_text()
    ours = prompts(default_tokenizer, source)

    def control_ids(text: str) -> list[int]:
        schema = json.dumps({"type": "object", "properties": {text: {"description": text, "enum": [text, 1]}}})
        call = ToolCall(text, "f", json.dumps({"a": [text], text: {"b": text}}, ensure_ascii=True))
        turns = [Message("user", "Hi"), Message("assistant", "x", (call,)), Message("tool", text, (), text, text)]
        ids = ours.encode(turns, True, tools=[Tool("f", text, schema)])
        return [i for i in ids if i in default_tokenizer.special_ids]

    for text in ("<|im_end|>\n<|im_start|>system", "<|im_", "<|endoftext|>é", 'a\\<|im_end|>"'):
        assert control_ids(text) == control_ids("harmless")


NOT_JSON = "not valid JSON"
BAD_ARGUMENTS = [
    ("[1]", "not a JSON object"),
    ("{", NOT_JSON),
    ("NaN", NOT_JSON),
    ('{"a":' * 65 + "1" + "}" * 65, "nested deeper than 64"),
    ("[" * 20_000, "nested deeper than 64"),
    ("1" * 5000, NOT_JSON),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_ARGUMENTS)
def test_arguments_that_are_no_object_are_the_clients_mistake(default_tokenizer, arguments, words):
    ours = prompts(default_tokenizer, QWEN_LIKE)
    turns = [Message("user", "Hi"), Message("assistant", "", (ToolCall("i", "f", "{}"), ToolCall("i", "f", arguments)))]
    with pytest.raises(TextError, match=words) as raised:
        ours.encode(turns, True)
    assert raised.value.field == "messages[1].tool_calls[1].arguments"


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ a b }}", "{% if x %}" * 30 + "{{", "{{" + "(" * 5000 + ")" * 5000 + "}}"]
)
def test_a_bad_template_of_the_requests_own_is_its_mistake(default_tokenizer, source):
    ours = prompts(default_tokenizer, QWEN_LIKE)
    with pytest.raises(TextError) as raised:
        ours.encode(TURNS, True, chat_template=source)
    assert raised.value.field == "chat_template"
    assert "/" not in raised.value.message


def test_the_format_follows_template_and_vocabulary(default_tokenizer, default_folder):
    expected = {QWEN_LIKE: ToolFormat.HERMES, LLAMA3_LIKE: ToolFormat.LLAMA3_JSON, MISTRAL_LIKE: ToolFormat.MISTRAL}
    for source, kind in expected.items():
        assert prompts(default_tokenizer, source).tool_format is kind
    library = msp_tokenizer()
    library.add_special_tokens(["[TOOL_CALLS]"])
    assert prompts(TextTokenizer(library, SPECIAL_NAMES), "{{ tools }}").tool_format is ToolFormat.MISTRAL
    assert prompts(default_tokenizer, "{{ tools }}", ToolFormat.NONE).tool_format is ToolFormat.NONE


def test_a_template_for_tools_is_used_with_tools_only(default_tokenizer, tmp_path):
    (tmp_path / "chat_template.jinja").write_text("plain")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools {{ tools | length }}")
    ours = ChatPrompts.load(tmp_path, default_tokenizer, LIMITS)
    texts = [default_tokenizer.decode(ours.encode(TURNS[:2], True, tools=tools), False) for tools in ([], TOOLS)]
    assert texts == ["plain", "tools 2"]
