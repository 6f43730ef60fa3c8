"""Tools, calls and their results for a chat template that knows nothing of them.

Such a template prints roles and contents only: what it does not know is written into the contents, in the
Hermes style or in the format that is set:

- the tools go to the end of the system's turn (one is put in front if there is none), one JSON object a line
  between <tools> and </tools>, after a line that says what they are and before one that says how to call;
- an assistant's calls follow the content of its turn, as the model is told to write them;
- results become the user's turn, each between <tool_response> and </tool_response>; neighbours share a turn.

Must not know: jinja2, tokens.
"""

import json
from collections.abc import Iterator, Sequence

from tokenizer_service.text.template_data import Data
from tokenizer_service.text.tool_formats import ToolFormat, written_calls

_EXAMPLE = [("NAME", {"ARGUMENT": "VALUE"})]


def with_tools(messages: Sequence[Data], tools: Sequence[Data], tool_format: ToolFormat) -> list[Data]:
    """The messages with the tools in the system's turn."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    section = (
        "These functions can be called; the parameters of each are a JSON schema of its arguments.\n"
        f"<tools>\n{lines}\n</tools>\n"
        f"Whenever a call helps to answer, write it in this form:\n{written_calls(_EXAMPLE, tool_format)}"
    )
    if messages and messages[0]["role"] == "system":
        first = messages[0]
        return [{**first, "content": _joined(first["content"], section, "\n\n")}, *messages[1:]]
    return [{"role": "system", "content": section}, *messages]


def with_written_turns(messages: Sequence[Data], tool_format: ToolFormat) -> list[Data]:
    """The messages without fields of tools; calls and results are in the contents."""
    written: list[Data] = []
    is_result_last = False
    for turn in messages:
        is_result = turn["role"] == "tool"
        new = _written_turn(turn, tool_format)
        if is_result and is_result_last:
            written[-1] = {**written[-1], "content": f"{written[-1]['content']}\n{new['content']}"}
        else:
            written.append(new)
        is_result_last = is_result
    return written


def _written_turn(turn: Data, tool_format: ToolFormat) -> Data:
    if turn["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{turn['content']}\n</tool_response>"}
    if "tool_calls" not in turn:
        return turn
    text = written_calls(_calls(turn), tool_format)
    kept = {key: value for key, value in turn.items() if key != "tool_calls"}
    return {**kept, "content": _joined(turn["content"], text, "\n")}


def _calls(turn: Data) -> Iterator[tuple[str, Data]]:
    for call in turn["tool_calls"]:
        yield call["function"]["name"], call["function"]["arguments"]


def _joined(content: str, more: str, between: str) -> str:
    return f"{content}{between}{more}" if content else more
