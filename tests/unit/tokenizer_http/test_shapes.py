"""A stream, put together by its reader, is the answer: for random events of several prompts and samples."""

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest

from tokenizer_service.engines.messages import FinishReason, Usage
from tokenizer_service.http.chat import ChatAnswer, ChatStream
from tokenizer_service.http.completions import CompletionAnswer, CompletionOptions, CompletionStream
from tokenizer_service.http.errors import HttpError
from tokenizer_service.http.facts import AnswerFacts
from tokenizer_service.http.response_fields import ResponseFields
from tokenizer_service.http.responses import ResponseAnswer, ResponseFacts, ResponseStream
from tokenizer_service.sessions.events import Completed, TextDelta, TextLogprob, TextPositionLogprobs, ToolCallDelta

Event = tuple[int, TextDelta | Completed]
WORDS = ["a", "é", " U", "\n\n", "data: x", "🌶"]


def position(dice: random.Random, word: str) -> TextPositionLogprobs:
    top = tuple(logprob_of(other, -float(n)) for n, other in enumerate(dice.sample(WORDS, 2)))
    return TextPositionLogprobs(logprob_of(word, -dice.random()), dice.randrange(9), top)


def logprob_of(word: str, logprob: float) -> TextLogprob:
    """A token of an id has one text."""
    return TextLogprob(ord(word[0]), word.encode(), logprob)


def sample_events(dice: random.Random, sample: int, prompt_tokens: int, *, tools: bool) -> list[TextDelta | Completed]:
    events: list[TextDelta | Completed] = []
    for _ in range(dice.randrange(5)):
        words = dice.choices(WORDS, k=dice.randrange(1, 4))
        logprobs = tuple(position(dice, word) for word in words)
        events.append(TextDelta("".join(words), tuple(range(len(words))), sample, logprobs))
    for call in range(dice.randrange(3) if tools else 0):
        events.append(TextDelta("", (5,), sample, (), (), (ToolCallDelta(call, f"id{call}", "add", ""),)))
        events.append(TextDelta("", (6,), sample, (), (), (ToolCallDelta(call, None, None, '{"a": 1}'),)))
    reason = dice.choice([FinishReason.STOP, FinishReason.LENGTH])
    usage = Usage(prompt_tokens, dice.randrange(9), 4 if sample == 0 else prompt_tokens)
    events.append(Completed(reason, usage, dice.choice([None, "DE"]), None, 7 + sample, sample, tools))
    return events


def mixed(dice: random.Random, prompts: int, samples: int, *, tools: bool = False, echo: bool = False) -> list[Event]:
    """The events of all samples, shuffled, those of one sample in order."""
    rows = []
    for place in range(prompts):
        for sample in range(samples):
            events = sample_events(dice, sample, 10 + place, tools=tools)
            if echo and sample == 0:
                first = (TextPositionLogprobs(None, 0, ()), position(dice, "b"))
                events[:0] = [TextDelta("", (), 0, (), first[:1]), TextDelta("", (), 0, (), first[1:])]
            rows.append([(place, event) for event in events])
    merged: list[Event] = []
    while any(rows):
        merged.append(dice.choice([row for row in rows if row]).pop(0))
    return merged


def chunks(frames: Iterable[bytes]) -> list[dict[str, Any]]:
    return [json.loads(frame[6:]) for frame in frames if frame != b"data: [DONE]\n\n"]


def run_stream(stream: Any, events: list[Event]) -> list[bytes]:
    frames = [frame for place, event in events for frame in stream.frames(place, event)]
    assert all(frame.endswith(b"\n\n") and frame.count(b"\n") == frame.count(b"\ndata: ") + 2 for frame in frames)
    return [*frames, *stream.closing()]


def run_answer(answer: Any, events: list[Event]) -> dict[str, Any]:
    for place, event in events:
        answer.add(place, event)
    return dict(json.loads(answer.body()))


@pytest.mark.parametrize("seed", range(40))
def test_chat(seed: int) -> None:
    dice = random.Random(seed)
    samples, tools = dice.randrange(1, 4), dice.random() < 0.5
    facts = AnswerFacts("id", 1, "m", samples, include_usage=True, with_logprobs=True, with_token_ids=True)
    events = mixed(dice, 1, samples, tools=tools)
    frames = run_stream(ChatStream(facts), events)
    assert frames[-1] == b"data: [DONE]\n\n"
    answer = run_answer(ChatAnswer(facts), events)
    *parts, last = chunks(frames)
    assert (last["choices"], last["usage"]) == ([], answer["usage"])
    assert all(part["usage"] is None and len(part["choices"]) == 1 for part in parts)
    assert len({(part["id"], part["created"], part["model"], part["object"]) for part in parts}) == 1
    for choice in answer["choices"]:
        check_chat_choice(
            choice, [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        )


def check_chat_choice(choice: dict[str, Any], parts: list[dict[str, Any]]) -> None:
    """B127, B128, B135."""
    assert [("role" in part["delta"]) for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert (parts[-1]["finish_reason"], parts[-1]["delta"]) == (choice["finish_reason"], {})
    assert "".join(part["delta"].get("content", "") for part in parts) == (choice["message"]["content"] or "")
    logprobs = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
    assert logprobs == choice["logprobs"]["content"]
    assert [token for part in parts for token in part.get("token_ids", [])] == choice["token_ids"]
    calls: dict[int, dict[str, Any]] = {}
    for delta in (call for part in parts for call in part["delta"].get("tool_calls", [])):
        call = calls.setdefault(
            delta["index"],
            {"id": delta.get("id"), "type": delta.get("type"), "function": {"name": "", "arguments": ""}},
        )
        call["function"]["name"] += delta["function"].get("name", "")
        call["function"]["arguments"] += delta["function"]["arguments"]
    assert list(calls.values()) == choice["message"].get("tool_calls", [])


@pytest.mark.parametrize("seed", range(40))
def test_completions(seed: int) -> None:
    dice = random.Random(seed)
    echo = dice.random() < 0.5
    samples = 1 if echo else dice.randrange(1, 4)
    options = CompletionOptions(["ab", "cb"] if echo else None)
    facts = AnswerFacts("id", 1, "m", samples, include_usage=True, with_logprobs=True)
    events = mixed(dice, 2, samples, echo=echo)
    *parts, last = chunks(run_stream(CompletionStream(facts, options), events))
    answer = run_answer(CompletionAnswer(facts, options), events)
    assert last["usage"] == answer["usage"]
    assert answer["usage"]["prompt_tokens"] == 21
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * samples))
    for choice in answer["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + [choice["finish_reason"]]
        for key, expected in choice["logprobs"].items():
            assert [entry for part in mine if part["logprobs"] for entry in part["logprobs"][key]] == expected, key
        if echo:
            assert choice["logprobs"]["tokens"][:2] == [choice["text"][0], "b"]
            assert choice["logprobs"]["token_logprobs"][0] is None
            assert choice["logprobs"]["text_offset"][:2] == [0, 1]
        tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
        assert all(choice["text"][start:].startswith(token) for token, start in zip(tokens, offsets, strict=True))
        assert "".join(tokens) == choice["text"]


@pytest.mark.parametrize("seed", range(40))
def test_responses(seed: int) -> None:
    dice = random.Random(seed)
    facts = ResponseFacts("id", 1, "m", ResponseFields(input="hi"))
    events = mixed(dice, 1, 1, tools=dice.random() < 0.5)
    frames = run_stream(ResponseStream(facts), events)
    sent = [json.loads(frame.split(b"\ndata: ", 1)[1]) for frame in frames]
    names = [frame.split(b"\n", 1)[0].removeprefix(b"event: ").decode() for frame in frames]
    assert [event["type"] for event in sent] == names
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    assert names[:2] == ["response.created", "response.in_progress"]
    answer = run_answer(ResponseAnswer(facts), events)
    assert sent[-1]["response"] == answer
    assert names[-1] == f"response.{answer['status']}"
    done = [event["item"] for event in sent if event["type"] == "response.output_item.done"]
    assert [(item["id"], item.get("content"), item.get("arguments")) for item in done] == [
        (item["id"], item.get("content"), item.get("arguments")) for item in answer["output"]
    ]
    text = "".join(event["delta"] for event in sent if event["type"] == "response.output_text.delta")
    assert text == "".join(item["content"][0]["text"] for item in done if item["type"] == "message")


@pytest.mark.parametrize("stream", [ChatStream, CompletionStream])
def test_a_failure_is_no_good_end(stream: Any) -> None:
    options = (CompletionOptions(),) if stream is CompletionStream else ()
    frames = b"".join(stream(AnswerFacts("id", 1, "m"), *options).failure(HttpError(503, "lost", code="x"), None))
    error = {"message": "lost", "type": "server_error", "param": None, "code": "x"}
    assert json.loads(frames[6:]) == {"error": error}
    for wants in (False, True):
        facts = AnswerFacts("id", 1, "m", include_usage=wants)
        frames = b"".join(stream(facts, *options).failure(HttpError(503, "lost", code="x"), Usage(5, 2, 4)))
        totals = {"prompt_tokens": 5, "completion_tokens": 2, "total_tokens": 7}
        usage = {"usage": {**totals, "prompt_tokens_details": {"cached_tokens": 4}}} if wants else {}
        assert json.loads(frames[6:]) == {"error": error | usage}
