"""What is the same in every part of one answer, and small tools to write it.

Must not know: any one API.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizer_service.engines.messages import FinishReason, Usage
from tokenizer_service.http.errors import HttpError
from tokenizer_service.http.usage import UsageTotals
from tokenizer_service.sessions.events import Completed


@dataclass(frozen=True, slots=True)
class AnswerFacts:
    """`id` as the client sees it, `created` in Unix seconds; `n` samples of each prompt."""

    id: str
    created: int
    model: str
    n: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    with_logprobs: bool = False
    with_token_ids: bool = False

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def with_usage(self, error: HttpError, delivered: Usage | None) -> HttpError:
        """The error at the end of a stream; a client that asked for usage learns what it has been sent."""
        if not self.include_usage or delivered is None:
            return error
        return replace(error, usage=UsageTotals.of(delivered).as_object())

    def choice_index(self, place: int, sample: int) -> int:
        """Prompt by prompt."""
        return place * self.n + sample


def compact(value: object) -> bytes:
    """JSON in UTF-8."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def compact_with(value: dict[str, Any], written: Mapping[str, bytes]) -> bytes:
    """JSON of an object and of members that are JSON already. `value` has at least one member."""
    members = [b',"' + name.encode() + b'":' + text for name, text in written.items()]
    return b"".join([compact(value)[:-1], *members, b"}"])


def written_list(parts: Iterable[Sequence[object]]) -> bytes:
    """JSON of one list that is made in parts, so that not all of it exists as objects at a time."""
    return b"[" + b",".join([compact(part)[1:-1] for part in parts if part]) + b"]"


def finish_reason(end: Completed) -> str:
    if end.reason is FinishReason.STOP and end.has_tool_calls:
        return "tool_calls"
    return end.reason.value


def end_fields(end: Completed) -> dict[str, Any]:
    """The end of a choice; `stop_reason` and `seed` are additions to OpenAI's."""
    stop = end.stop_token_id if end.stop_string is None else end.stop_string
    return {"finish_reason": finish_reason(end), "stop_reason": stop, "seed": end.seed}
