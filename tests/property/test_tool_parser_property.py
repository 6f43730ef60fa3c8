"""Tool calls out of a text: what is read does not depend on the split, and nothing is lost (issue C)."""

import itertools
import json
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tokenizer_service.text.json_scanner import JsonScanner
from tokenizer_service.text.tool_formats import FORCED_SYNTAX, SYNTAXES, ToolFormat, ToolSyntax, written_calls
from tokenizer_service.text.tool_parser import StreamingToolParser

NAMES = frozenset({"get_weather", "f"})
SYNTAX_LIST = [*SYNTAXES.values(), FORCED_SYNTAX]
PIECES = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "\n", " ", "[", "]", ";", ",", "Hi", "{", "}",
    '"', "\\", "1e",
    '{"name": "f", "arguments": {"a": [1, "}<tool_call>"]}}', '{"name":"f","parameters":{}}',
    '{"arguments": {"a": "\\u00e9"}, "name": "get_weather"}', '{"name": "other", "arguments": {}}', '"name": "f", ',
    '{"name": "f", "arguments": ', '{"name": "f"}', '{"name": "f", "arguments": {}, "id": [1]}', "null", "true", ": ",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(PIECES), max_size=8).map("".join)


@dataclass(slots=True)
class Read:
    """All that a parser made of a text; a call is [id, name, arguments]."""

    text: str = ""
    calls: list[list[str]] = field(default_factory=list)


def read(syntax: ToolSyntax, parts: list[str], most_calls: int | None = None) -> Read:
    counter = itertools.count()
    parser = StreamingToolParser(syntax, NAMES, lambda: f"id{next(counter)}", most_calls)
    made = Read()
    for text, calls in [*(parser.feed(part) for part in parts), parser.finish()]:
        made.text += text
        for call in calls:
            if call.id is not None:
                assert call.index == len(made.calls)
                made.calls.append([call.id, call.name or "", call.arguments])
            else:
                assert (call.name, call.index) == (None, len(made.calls) - 1)
                made.calls[-1][2] += call.arguments
    return made


@settings(max_examples=400, deadline=None)
@given(syntax=st.sampled_from(SYNTAX_LIST), text=TEXTS, cuts=st.lists(st.integers(0, 200), max_size=12))
def test_any_split_gives_the_same(syntax: ToolSyntax, text: str, cuts: list[int]) -> None:
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    whole = read(syntax, [text])
    assert read(syntax, [text[a:b] for a, b in itertools.pairwise(places)]) == whole
    assert read(syntax, list(text)) == whole


@settings(max_examples=300, deadline=None)
@given(
    syntax=st.sampled_from(SYNTAX_LIST), text=TEXTS, cut=st.integers(0, 200), rest=TEXTS, most=st.sampled_from([1, 2])
)
@example(SYNTAXES[ToolFormat.HERMES], '<tool_call>{"name": "f", "arguments": {}}', 9, "</tool_call> Hi", 1)
def test_the_last_call_that_is_allowed_is_the_end(
    syntax: ToolSyntax, text: str, cut: int, rest: str, most: int
) -> None:
    """The calls are the first ones of all; once the last is complete, nothing that follows is seen."""
    limited = read(syntax, list(text), most)
    assert read(syntax, [text[:cut], text[cut:]], most) == limited
    assert limited.calls == read(syntax, [text]).calls[:most]
    parser = StreamingToolParser(syntax, NAMES, lambda: "", most)
    parser.feed(text)
    if parser.is_over:
        assert len(limited.calls) == most
        assert read(syntax, [text, rest], most) == limited


@settings(max_examples=200, deadline=None)
@given(syntax=st.sampled_from(SYNTAX_LIST), text=TEXTS)
def test_text_without_a_call_is_untouched(syntax: ToolSyntax, text: str) -> None:
    made = read(syntax, [text])
    assert made.calls or made.text == text


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), st.dictionaries(st.text(), JSON, max_size=3)), min_size=1)


@settings(max_examples=200, deadline=None)
@given(kind=st.sampled_from(list(SYNTAXES)), calls=CALLS, before=st.sampled_from(["", "Let me see.", "\n", "a <tool"]))
def test_written_calls_are_read_back(kind: ToolFormat, calls: list[tuple[str, dict[str, object]]], before: str) -> None:
    if SYNTAXES[kind].is_whole_text:
        before = ""
    made = read(SYNTAXES[kind], list(before + written_calls(calls, kind)))
    assert made.text == before.rstrip()
    assert [(name, json.loads(arguments)) for _, name, arguments in made.calls] == calls
    assert [call[0] for call in made.calls] == [f"id{place}" for place in range(len(calls))]


@settings(max_examples=400, deadline=None)
@given(text=st.dictionaries(st.text(), JSON, max_size=4).map(json.dumps) | TEXTS)
@example('{"a": 01}')
@example('{"a": tru}')
@example('{"a": 1,}')
@example('{"a": "\t"}')
@example('{"a": "\\x"}')
def test_the_scanner_knows_json_objects_as_the_library_does(text: str) -> None:
    text = text.lstrip(" \t\n\r")  # which the library does not skip here
    scanner = JsonScanner()
    end = scanner.scan(text)
    try:
        value, expected = json.JSONDecoder().raw_decode(text)
    except ValueError:
        assert not scanner.is_done
    else:
        assert scanner.is_done == isinstance(value, dict)
        assert not scanner.is_done or end == expected


def test_a_name_comes_first_and_arguments_as_they_come() -> None:
    parser = StreamingToolParser(SYNTAXES[ToolFormat.HERMES], NAMES, lambda: "id")
    seen = [
        parser.feed(part)
        for part in ('So: <tool_call>\n{"name": "f", "arg', 'uments": {"a', '": 1}', "}\n</tool_c", "all>")
    ]
    assert [text for text, _ in seen] == ["So:", "", "", "", ""]
    deltas = [[(call.id, call.name, call.arguments) for call in calls] for _, calls in seen]
    assert deltas == [[], [("id", "f", ""), (None, None, '{"a')], [(None, None, '": 1}')], [], []]
    assert parser.finish() == ("", ())


@pytest.mark.parametrize(
    ("text", "shown", "arguments"),
    [
        ('<tool_call>{"name": "f", "arguments": {"a": 1}}', "", ['{"a": 1}']),
        ('<tool_call>{"name": "f", "arguments": {"a": ', "", ['{"a": ']),
        ('<tool_call>{"name": "f", "arguments": {"a" 1}}</tool_call>', "1}}</tool_call>", ['{"a" ']),
        ('a\n<tool_call>{"name": "other", "arguments": {}}</tool_call>', None, []),
        ('<tool_call> no <tool_call>{"name": "f", "arguments": {}}</tool_call> ', "<tool_call> no", ["{}"]),
        ('<tool_call>{"name": "f"}</tool_call>\n\n<tool_call>{"name": "f"}</tool_call>', "", ["{}", "{}"]),
        ('<tool_call>{"name": "f", "arguments": []}</tool_call>', None, []),
        ("x < y <tool_cal", None, []),
    ],
)
def test_broken_calls(text: str, shown: str | None, arguments: list[str]) -> None:
    made = read(SYNTAXES[ToolFormat.HERMES], list(text))
    assert (made.text, [call[2] for call in made.calls]) == (text if shown is None else shown, arguments)
