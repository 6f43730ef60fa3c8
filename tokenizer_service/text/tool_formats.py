"""How families of models write tool calls in their text: which one a model uses, and writing them.

Must not know: reading calls (tool_parser), templates' engine, requests.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

_ID_LETTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_SHORT_ID_LENGTH = 9


class ToolFormat(Enum):
    """`--tool-call-format`.

    HERMES: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, anywhere, several.
    LLAMA3_JSON: {"name": ..., "parameters": {...}} as the whole text, after an optional <|python_tag|>, several
    with ";" between them.
    MISTRAL: [TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...].
    NONE: calls are not read.
    """

    HERMES = "hermes"
    LLAMA3_JSON = "llama3-json"
    MISTRAL = "mistral"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """What stands around the JSON objects of calls. An empty string is nothing at all.

    `opener` and `list_open` come before the first call, `separator` between two, `closer` after the last.
    `is_whole_text`: calls are the whole text, and the opener may be left out.
    """

    opener: str
    list_open: str
    separator: str
    closer: str
    arguments_key: str = "arguments"
    is_whole_text: bool = False


SYNTAXES = {
    ToolFormat.HERMES: ToolSyntax("<tool_call>", "", "", "</tool_call>"),
    ToolFormat.LLAMA3_JSON: ToolSyntax("<|python_tag|>", "", ";", "", "parameters", is_whole_text=True),
    ToolFormat.MISTRAL: ToolSyntax("[TOOL_CALLS]", "[", ",", "]"),
}
# What may be a special token, and has to be seen all the same.
MARKERS: dict[ToolFormat, tuple[str, ...]] = {
    ToolFormat.HERMES: ("<tool_call>", "</tool_call>"),
    ToolFormat.LLAMA3_JSON: ("<|python_tag|>",),
    ToolFormat.MISTRAL: ("[TOOL_CALLS]",),
    ToolFormat.NONE: (),
}
# What a model writes when it is made to call: one array, whatever its own format.
FORCED_SYNTAX = ToolSyntax("", "[", ",", "]", is_whole_text=True)


def detect_format(sources: Sequence[str], knows_tools: bool, has_token: Callable[[str], bool]) -> ToolFormat:
    """The format of a model, by its templates (`sources`), then by its vocabulary; HERMES where nothing tells.

    `knows_tools`: a template shows tools to the model. Without, our own section does, in HERMES.
    """
    if not knows_tools:
        return ToolFormat.HERMES
    template = "\n".join(sources)
    if "[TOOL_CALLS]" in template:
        return ToolFormat.MISTRAL
    if "<tool_call>" in template:
        return ToolFormat.HERMES
    if "<|python_tag|>" in template or '"parameters":' in template or has_token("<|python_tag|>"):
        return ToolFormat.LLAMA3_JSON
    return ToolFormat.MISTRAL if has_token("[TOOL_CALLS]") else ToolFormat.HERMES


def written_calls(calls: Iterable[tuple[str, Any]], tool_format: ToolFormat) -> str:
    """The text of calls, each a name and its arguments as an object."""
    syntax = SYNTAXES.get(tool_format, SYNTAXES[ToolFormat.HERMES])
    objects = [
        json.dumps({"name": name, syntax.arguments_key: arguments}, ensure_ascii=False) for name, arguments in calls
    ]
    if syntax.list_open:
        return f"{syntax.opener} {syntax.list_open}{f'{syntax.separator} '.join(objects)}{syntax.closer}"
    if syntax.separator:
        return f"{syntax.separator} ".join(objects)
    return "\n".join(f"{syntax.opener}\n{each}\n{syntax.closer}" for each in objects)


def call_id(tool_format: ToolFormat, bits: int) -> str:
    """An id made of random `bits` (63 of them). Mistral's templates take nothing but nine letters and digits."""
    if tool_format is not ToolFormat.MISTRAL:
        return f"call_{bits:016x}"
    letters = []
    for _ in range(_SHORT_ID_LENGTH):
        bits, place = divmod(bits, len(_ID_LETTERS))
        letters.append(_ID_LETTERS[place])
    return "".join(letters)
