"""Answers of POST /v1/responses, as one object and as the events of a stream.

Must not know: how requests are served.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizer_service.engines.messages import FinishReason, Usage
from tokenizer_service.http.chat import ChatChoice
from tokenizer_service.http.errors import HttpError
from tokenizer_service.http.facts import compact
from tokenizer_service.http.response_fields import ResponseFields
from tokenizer_service.http.usage import UsageTotals
from tokenizer_service.sessions.events import Completed, TextDelta, ToolCallDelta

# OpenAI's codes of `response.error`; all others are failures of the server.
_FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}


@dataclass(frozen=True, slots=True)
class ResponseFacts:
    """`request_id` without a prefix; `created` in Unix seconds."""

    request_id: str
    created: int
    model: str
    fields: ResponseFields

    def message(self, text: str, status: str) -> dict[str, Any]:
        content = [output_text(text)] if status != "in_progress" else []
        identity = f"msg_{self.request_id}"
        return {"id": identity, "type": "message", "status": status, "role": "assistant", "content": content}

    def call(self, place: int, call: dict[str, Any], status: str) -> dict[str, Any]:
        return {
            "id": f"fc_{self.request_id}_{place}",
            "type": "function_call",
            "status": status,
            "call_id": call["id"],
            "name": call["name"],
            "arguments": call["arguments"],
        }

    def body(self, status: str, output: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The response object: what was asked for, and what has come of it so far."""
        given = self.fields.model_dump(mode="json", by_alias=True, exclude_none=True)
        return {
            "id": f"resp_{self.request_id}",
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": given.get("instructions"),
            "max_output_tokens": given.get("max_output_tokens"),
            "metadata": given.get("metadata", {}),
            "model": self.model,
            "output": output,
            "parallel_tool_calls": given.get("parallel_tool_calls", True),
            "previous_response_id": None,
            "reasoning": None,
            "store": False,
            "temperature": given.get("temperature"),
            "text": given.get("text", {"format": {"type": "text"}}),
            "tool_choice": given.get("tool_choice", "auto"),
            "tools": given.get("tools", []),
            "top_p": given.get("top_p"),
            "truncation": "disabled",
            "usage": None,
            **more,
        }


def output_text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def usage_object(usage: UsageTotals) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


class ResponseAnswer:
    """An AnswerShape."""

    def __init__(self, facts: ResponseFacts) -> None:
        self._facts = facts
        self._choice = ChatChoice()

    def add(self, place: int, event: TextDelta | Completed) -> None:
        self._choice.add(event)

    def body(self) -> bytes:
        return compact(self.as_object())

    def as_object(self) -> dict[str, Any]:
        """The whole response, once the end was added."""
        end = self._choice.end
        assert end is not None
        usage = UsageTotals()
        usage.add(0, end)
        is_cut = end.reason is FinishReason.LENGTH
        status = "incomplete" if is_cut else "completed"
        details = {"reason": "max_output_tokens"} if is_cut else None
        return self._facts.body(status, self._output(status), incomplete_details=details, usage=usage_object(usage))

    def failed(self, error: HttpError, delivered: Usage | None) -> dict[str, Any]:
        """The response that ended with `error`, with what had come of it."""
        output = self._output("incomplete") if self._choice.text or self._choice.calls else []
        code = _FAILURE_CODES.get(error.status, "server_error")
        usage = None if delivered is None else usage_object(UsageTotals.of(delivered))
        return self._facts.body("failed", output, error={"code": code, "message": error.message}, usage=usage)

    def _output(self, status: str) -> list[dict[str, Any]]:
        calls = sorted(self._choice.calls.items())
        items = [self._facts.call(place, call, status) for place, call in calls]
        text = self._choice.text
        return [self._facts.message(text, status), *items] if text or not items else items


class ResponseStream:
    """A StreamShape: items one after the other, each opened, filled and closed; numbered events."""

    def __init__(self, facts: ResponseFacts) -> None:
        self._facts = facts
        self._answer = ResponseAnswer(facts)
        self._number = 0
        self._items = 0
        self._text: list[str] | None = None
        self._call: dict[str, Any] | None = None

    def frames(self, place: int, event: TextDelta | Completed) -> Iterator[bytes]:
        if self._number == 0:
            for kind in ("response.created", "response.in_progress"):
                yield self._frame(kind, response=self._facts.body("in_progress", []))
        self._answer.add(place, event)
        if isinstance(event, Completed):
            yield from self._finish(event)
            return
        if event.text:
            yield from self._add_text(event.text)
        for call in event.tool_calls:
            yield from self._add_call(call)

    def _frame(self, kind: str, **fields: Any) -> bytes:
        payload = compact({"type": kind, **fields, "sequence_number": self._number})
        self._number += 1
        return b"event: " + kind.encode() + b"\ndata: " + payload + b"\n\n"

    def _part(self, kind: str, **fields: Any) -> bytes:
        """An event about the one content part of the open message."""
        identity = f"msg_{self._facts.request_id}"
        return self._frame(kind, item_id=identity, output_index=self._items, content_index=0, **fields)

    def _add_text(self, text: str) -> Iterator[bytes]:
        if self._text is None:
            yield from self._close_call("completed")
            self._text = []
            item = self._facts.message("", "in_progress")
            yield self._frame("response.output_item.added", output_index=self._items, item=item)
            yield self._part("response.content_part.added", part=output_text(""))
        if text:
            self._text.append(text)
            yield self._part("response.output_text.delta", delta=text, logprobs=[])

    def _close_text(self, status: str) -> Iterator[bytes]:
        if self._text is None:
            return
        text, self._text = "".join(self._text), None
        yield self._part("response.output_text.done", text=text, logprobs=[])
        yield self._part("response.content_part.done", part=output_text(text))
        item = self._facts.message(text, status)
        yield self._frame("response.output_item.done", output_index=self._items, item=item)
        self._items += 1

    def _add_call(self, delta: ToolCallDelta) -> Iterator[bytes]:
        if self._call is None or delta.index != self._call["place"]:
            yield from self._close_text("completed")
            yield from self._close_call("completed")
            self._call = {"place": delta.index, "id": delta.id, "name": delta.name, "arguments": ""}
            item = self._facts.call(delta.index, self._call, "in_progress")
            yield self._frame("response.output_item.added", output_index=self._items, item=item)
        if delta.arguments:
            self._call["arguments"] += delta.arguments
            yield self._call_part("response.function_call_arguments.delta", delta.index, delta=delta.arguments)

    def _call_part(self, kind: str, place: int, **fields: Any) -> bytes:
        identity = f"fc_{self._facts.request_id}_{place}"
        return self._frame(kind, item_id=identity, output_index=self._items, **fields)

    def _close_call(self, status: str) -> Iterator[bytes]:
        if self._call is None:
            return
        call, self._call = self._call, None
        place, arguments = call["place"], call["arguments"]
        kind = "response.function_call_arguments.done"
        yield self._call_part(kind, place, name=call["name"], arguments=arguments)
        item = self._facts.call(place, call, status)
        yield self._frame("response.output_item.done", output_index=self._items, item=item)
        self._items += 1

    def _finish(self, end: Completed) -> Iterator[bytes]:
        if self._items == 0 and self._text is None and self._call is None:
            yield from self._add_text("")
        body = self._answer.as_object()
        status = body["status"]
        yield from self._close_text(status)
        yield from self._close_call(status)
        yield self._frame(f"response.{status}", response=body)

    def closing(self) -> Iterator[bytes]:
        """The last event has come with the end."""
        return iter(())

    def failure(self, error: HttpError, delivered: Usage | None) -> Iterator[bytes]:
        fields = error.as_object()
        yield self._frame("error", code=fields["code"], message=fields["message"], param=fields["param"])
        yield self._frame("response.failed", response=self._answer.failed(error, delivered))
