"""Answers of POST /v1/chat/completions, as a stream of chunks and as one object.

Must not know: how requests are served.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenizer_service.engines.messages import Usage
from tokenizer_service.http.endpoint import data_frame, error_frame
from tokenizer_service.http.errors import HttpError
from tokenizer_service.http.facts import AnswerFacts, compact, compact_with, end_fields
from tokenizer_service.http.logprob_shapes import chat_content, prompt_positions, written_content, written_prompt
from tokenizer_service.http.packed_logprobs import PackedLogprobs
from tokenizer_service.http.usage import UsageTotals
from tokenizer_service.sessions.events import Completed, TextDelta, ToolCallDelta

_CHUNK = "chat.completion.chunk"


class ChatStream:
    """A StreamShape. The first chunk of each choice has the role, the last one the finish reason."""

    def __init__(self, facts: AnswerFacts) -> None:
        self._facts = facts
        self._head = facts.head(_CHUNK)
        self._usage = UsageTotals()
        self._begun: set[int] = set()

    def frames(self, place: int, event: TextDelta | Completed) -> Iterator[bytes]:
        if event.index not in self._begun:
            self._begun.add(event.index)
            yield self._chunk(event.index, {"role": "assistant", "content": ""})
        if isinstance(event, Completed):
            self._usage.add(place, event)
            yield self._chunk(event.index, {}, **end_fields(event))
        else:
            yield from self._delta_frames(event)

    def _delta_frames(self, event: TextDelta) -> Iterator[bytes]:
        facts = self._facts
        delta: dict[str, Any] = {}
        if event.text:
            delta["content"] = event.text
        if event.tool_calls:
            delta["tool_calls"] = [_call_delta(call) for call in event.tool_calls]
        more: dict[str, Any] = {}
        if facts.with_logprobs and event.logprobs:
            more["logprobs"] = {"content": chat_content(event.logprobs), "refusal": None}
        if facts.with_token_ids and event.token_ids:
            more["token_ids"] = list(event.token_ids)
        if event.prompt_logprobs:
            more["prompt_logprobs"] = prompt_positions(event.prompt_logprobs)
        if delta or more:
            yield self._chunk(event.index, delta, **more)

    def _chunk(self, index: int, delta: dict[str, Any], **more: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **more}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if self._facts.include_usage:
            chunk["usage"] = self._usage.as_object() if self._facts.continuous_usage else None
        return data_frame(compact(chunk))

    def closing(self) -> Iterator[bytes]:
        if self._facts.include_usage:
            yield data_frame(compact({**self._head, "choices": [], "usage": self._usage.as_object()}))
        yield data_frame(b"[DONE]")

    def failure(self, error: HttpError, delivered: Usage | None) -> Iterator[bytes]:
        yield error_frame(self._facts.with_usage(error, delivered))


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


@dataclass(slots=True)
class ChatChoice:
    """One choice as it grows; also what the Responses API builds its output from."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    prompt_logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)
    end: Completed | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def add(self, event: TextDelta | Completed) -> None:
        if isinstance(event, Completed):
            self.end = event
            return
        self.texts.append(event.text)
        self.token_ids.extend(event.token_ids)
        self.logprobs.extend(event.logprobs)
        self.prompt_logprobs.extend(event.prompt_logprobs)
        for call in event.tool_calls:
            self._add_call(call)

    def _add_call(self, delta: ToolCallDelta) -> None:
        call = self.calls.setdefault(delta.index, {"id": delta.id, "name": delta.name, "arguments": ""})
        call["arguments"] += delta.arguments

    def message(self) -> dict[str, Any]:
        text = self.text
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if self.calls:
            message["content"] = text or None
            message["tool_calls"] = [_call(call) for _, call in sorted(self.calls.items())]
        return message


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = {"name": call["name"], "arguments": call["arguments"]}
    return {"id": call["id"], "type": "function", "function": function}


class ChatAnswer:
    """An AnswerShape."""

    def __init__(self, facts: AnswerFacts) -> None:
        self._facts = facts
        self._usage = UsageTotals()
        self._choices: dict[int, ChatChoice] = defaultdict(ChatChoice)

    def add(self, place: int, event: TextDelta | Completed) -> None:
        self._choices[event.index].add(event)
        if isinstance(event, Completed):
            self._usage.add(place, event)

    def body(self) -> bytes:
        choices = [self._choice(index, choice) for index, choice in sorted(self._choices.items())]
        written = {"choices": b"[" + b",".join(choices) + b"]"}
        prompt = self._choices[0].prompt_logprobs
        if prompt:
            written["prompt_logprobs"] = written_prompt(prompt)
        return compact_with({**self._facts.head("chat.completion"), "usage": self._usage.as_object()}, written)

    def _choice(self, index: int, choice: ChatChoice) -> bytes:
        assert choice.end is not None
        made: dict[str, Any] = {"index": index, "message": choice.message()}
        if self._facts.with_token_ids:
            made["token_ids"] = choice.token_ids
        logprobs = written_content(choice.logprobs) if self._facts.with_logprobs else b"null"
        return compact_with(made | end_fields(choice.end), {"logprobs": logprobs})
