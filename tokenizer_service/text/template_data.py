"""A conversation and its tools as chat templates read them: plain dictionaries and lists, as transformers makes them.

Must not know: jinja2, tokens, how a model writes its calls.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tokenizer_service.text.errors import TextError
from tokenizer_service.text.messages import Message, Tool, ToolCall

Data = dict[str, Any]

_MAX_DEPTH = 64


def message_data(messages: Sequence[Message]) -> list[Data]:
    """One dictionary a turn; the arguments of its calls are objects.

    Raises TextError on `messages[i].tool_calls[j].arguments` for what is no JSON object.
    """
    return [
        _turn(f"messages[{place}]", turn)
        if turn.tool_calls or turn.tool_call_id is not None or turn.name is not None
        else {"role": turn.role, "content": turn.content}
        for place, turn in enumerate(messages)
    ]


def tool_data(tools: Sequence[Tool]) -> list[Data]:
    """Each tool as {"type": "function", "function": {...}}; without parameters, a schema of any object.

    Raises TextError on `tools[i].parameters` for what is no JSON object.
    """
    return [
        {"type": "function", "function": _function(f"tools[{place}].parameters", tool)}
        for place, tool in enumerate(tools)
    ]


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """`value` with every string in it changed, the keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {map_strings(key, change): map_strings(part, change) for key, part in value.items()}
    if isinstance(value, list):
        return [map_strings(part, change) for part in value]
    return value


def strings_in(value: Any) -> Iterator[str]:
    """Every string in `value`, the keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from strings_in(key)
            yield from strings_in(part)
    elif isinstance(value, list):
        for part in value:
            yield from strings_in(part)


def json_object(field: str, text: str) -> Data:
    """Raises TextError on `field` for what is no JSON object, or one of more than 64 levels."""
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise TextError(field, f"the JSON is nested deeper than {_MAX_DEPTH} levels") from None
    except ValueError as error:
        raise TextError(field, f"not valid JSON: {error}"[:200]) from None
    if not isinstance(value, dict):
        raise TextError(field, "not a JSON object")
    _check_depth(field, value)
    return value


def _turn(path: str, turn: Message) -> Data:
    data: Data = {"role": turn.role, "content": turn.content}
    if turn.name is not None:
        data["name"] = turn.name
    if turn.tool_call_id is not None:
        data["tool_call_id"] = turn.tool_call_id
    if turn.tool_calls:
        data["tool_calls"] = [
            _call(f"{path}.tool_calls[{place}].arguments", call) for place, call in enumerate(turn.tool_calls)
        ]
    return data


def _call(field: str, call: ToolCall) -> Data:
    """Templates write the arguments as they write any object; a call without any may be sent as ""."""
    arguments = json_object(field, call.arguments or "{}")
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _function(field: str, tool: Tool) -> Data:
    schema = {"type": "object", "properties": {}} if tool.parameters is None else json_object(field, tool.parameters)
    described = {} if tool.description is None else {"description": tool.description}
    return {"name": tool.name, **described, "parameters": schema}


def _check_depth(field: str, value: Data) -> None:
    level: list[Any] = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            part
            for node in level
            if isinstance(node, dict | list)
            for part in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return
    raise TextError(field, f"the JSON is nested deeper than {_MAX_DEPTH} levels")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
