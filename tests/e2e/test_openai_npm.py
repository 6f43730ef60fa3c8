"""The official `openai` package of npm, unmodified: a streaming chat. Installs it from the registry, hence slow."""

import asyncio
import json
import shutil
from pathlib import Path

import pytest

from tests.fixtures.openai_sdk import KEY, MODEL, PARIS, sdk_stack

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("npm") is None, reason="npm is not installed")]

PROGRAM = """
import OpenAI from "openai";
const client = new OpenAI({ baseURL: process.argv[2], apiKey: process.argv[3], maxRetries: 0 });
const stream = await client.chat.completions.create({
  model: process.argv[4], temperature: 0, stream: true, stream_options: { include_usage: true },
  messages: [{ role: "user", content: "What is the capital of France? Answer briefly." }],
});
let text = "", usage = null;
for await (const chunk of stream) {
  text += chunk.choices[0]?.delta?.content ?? "";
  usage = chunk.usage ?? usage;
}
let refused = null;
try {
  await client.chat.completions.create({ model: process.argv[4], messages: [], stream: true });
} catch (error) {
  refused = [error.constructor.name, error.status, error.param];
}
console.log(JSON.stringify({ text, usage, refused }));
"""


async def output_of(folder: Path, *command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, cwd=folder, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    assert process.returncode == 0, command
    return output.decode()


async def test_a_streaming_chat(tmp_path: Path) -> None:
    (tmp_path / "chat.mjs").write_text(PROGRAM)
    await output_of(tmp_path, "npm", "install", "--no-audit", "--no-fund", "--silent", "openai")
    async with sdk_stack(tmp_path / "logs") as stack:
        url = f"http://127.0.0.1:{await stack.tokenizer.port('http_port')}/v1"
        found = json.loads(await output_of(tmp_path, "node", "chat.mjs", url, KEY, MODEL))
    assert found["text"] == PARIS
    assert found["usage"]["total_tokens"] == found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"]
    assert found["refused"] == ["BadRequestError", 400, "messages"]
