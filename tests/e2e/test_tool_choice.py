"""Forced tool calls on the default model: whatever it would rather say, arguments fit the schema."""

import asyncio
import json
from pathlib import Path
from typing import Any

import jsonschema

from tests.fixtures.openai_sdk import MODEL, sdk_client, sdk_stack

BOOK: Any = {
    "type": "object",
    "properties": {
        "room": {"$ref": "#/$defs/room"},
        "nights": {"type": "integer", "minimum": 1, "maximum": 14},
        "guests": {"type": "array", "items": {"enum": ["Ann", "Bob", "Zoë"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["room", "nights", "guests"],
    "additionalProperties": False,
    "$defs": {
        "room": {
            "type": "object",
            "properties": {"kind": {"enum": ["single", "double"]}, "floor": {"type": "integer", "maximum": 99}},
            "required": ["kind"],
            "additionalProperties": False,
        }
    },
}
PING: Any = {"type": "object", "properties": {"id": {"type": "string", "pattern": "^[a-f0-9]{4}$"}}, "required": ["id"],
             "additionalProperties": False}  # fmt: skip
SCHEMAS = {"book": BOOK, "ping": PING}
TOOLS: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMAS[name]}} for name in SCHEMAS]


async def test_forced_calls_fit_their_schemas(tmp_path: Path) -> None:
    ask: Any = [{"role": "user", "content": "A double room for Ann and Bob, two nights."}]
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "ping"}}]
    async with sdk_stack(tmp_path) as stack, sdk_client(stack) as client:

        async def calls(seed: int) -> list[Any]:
            answer = await client.chat.completions.create(
                model=MODEL, messages=ask, tools=TOOLS, tool_choice=choices[seed % 2], temperature=1, seed=seed,
                max_tokens=2000,
            )  # fmt: skip
            (choice,) = answer.choices
            assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
            return choice.message.tool_calls or []

        made = await asyncio.gather(*map(calls, range(12)))
    assert all(made)
    assert all([call.function.name for call in turn] == ["ping"] for turn in made[1::2])
    for call in (call for turn in made for call in turn):
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
