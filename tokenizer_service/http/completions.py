"""Answers of POST /v1/completions, as a stream of chunks and as one object.

Must not know: how requests are served.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tokenizer_service.engines.messages import Usage
from tokenizer_service.http.chat import ChatChoice
from tokenizer_service.http.endpoint import data_frame, error_frame
from tokenizer_service.http.errors import HttpError
from tokenizer_service.http.facts import AnswerFacts, compact, compact_with, end_fields
from tokenizer_service.http.logprob_shapes import CompletionLogprobs, first_token_text, prompt_positions, written_prompt
from tokenizer_service.http.usage import UsageTotals
from tokenizer_service.sessions.events import Completed, TextDelta, TextPositionLogprobs

_KIND = "text_completion"


@dataclass(frozen=True, slots=True)
class CompletionOptions:
    """`echoes`: the prompts' texts, to show before the completions; None when they are not wanted."""

    echoes: Sequence[str] | None = None
    with_prompt_logprobs: bool = False

    def echo(self, place: int) -> str:
        return "" if self.echoes is None else self.echoes[place]


class CompletionStream:
    """A StreamShape. An echoed prompt comes with the first chunk of its choice."""

    def __init__(self, facts: AnswerFacts, options: CompletionOptions) -> None:
        self._facts = facts
        self._options = options
        self._head = facts.head(_KIND)
        self._usage = UsageTotals()
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._held: dict[int, list[TextPositionLogprobs]] = defaultdict(list)

    def frames(self, place: int, event: TextDelta | Completed) -> Iterator[bytes]:
        index = self._facts.choice_index(place, event.index)
        if isinstance(event, TextDelta):
            self._held[index].extend(event.prompt_logprobs)
            if not event.token_ids and not event.text:
                return  # more of the prompt's log probabilities are to come
        positions, text, more = self._begin(place, index)
        if isinstance(event, Completed):
            self._usage.add(place, event)
            yield self._chunk(index, text, positions, **more, **end_fields(event))
            return
        if self._facts.with_token_ids:
            more["token_ids"] = list(event.token_ids)
        positions.extend(event.logprobs)
        yield self._chunk(index, text + event.text, positions, **more)

    def _begin(self, place: int, index: int) -> tuple[list[TextPositionLogprobs], str, dict[str, Any]]:
        """What the first chunk of a choice has beside its own text: the prompt, in the ways that are wanted."""
        if index in self._logprobs:
            return [], "", {}
        held, text = self._held.pop(index, []), self._options.echo(place)
        self._logprobs[index] = CompletionLogprobs(first_token_text(text, held))
        more: dict[str, Any] = {}
        if self._options.with_prompt_logprobs and held:
            more["prompt_logprobs"] = prompt_positions(held)
        return held if self._options.echoes is not None else [], text, more

    def _chunk(self, index: int, text: str, positions: list[TextPositionLogprobs], **more: Any) -> bytes:
        made = None
        if self._facts.with_logprobs and positions:
            made = self._logprobs[index].add(positions)
        choice = {"index": index, "text": text, "logprobs": made, "finish_reason": None, **more}
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


class CompletionAnswer:
    """An AnswerShape."""

    def __init__(self, facts: AnswerFacts, options: CompletionOptions) -> None:
        self._facts = facts
        self._options = options
        self._usage = UsageTotals()
        self._choices: dict[tuple[int, int], ChatChoice] = defaultdict(ChatChoice)

    def add(self, place: int, event: TextDelta | Completed) -> None:
        self._choices[place, event.index].add(event)
        if isinstance(event, Completed):
            self._usage.add(place, event)

    def body(self) -> bytes:
        choices = [self._choice(place, sample) for place, sample in sorted(self._choices)]
        written = {"choices": b"[" + b",".join(choices) + b"]"}
        return compact_with({**self._facts.head(_KIND), "usage": self._usage.as_object()}, written)

    def _choice(self, place: int, sample: int) -> bytes:
        choice = self._choices[place, sample]
        assert choice.end is not None
        # The prompt's come with its first sample; all samples have the same prompt.
        prompt = self._choices[place, 0].prompt_logprobs
        text = self._options.echo(place)
        made: dict[str, Any] = {"index": self._facts.choice_index(place, sample), "text": text + choice.text}
        if self._facts.with_token_ids:
            made["token_ids"] = choice.token_ids
        written = {"logprobs": b"null"}
        if self._facts.with_logprobs:
            shown = prompt if self._options.echoes is not None else ()
            shape = CompletionLogprobs(first_token_text(text, prompt))
            written["logprobs"] = shape.written(chain(shown, choice.logprobs))
        if self._options.with_prompt_logprobs:
            written["prompt_logprobs"] = written_prompt(prompt)
        return compact_with(made | end_fields(choice.end), written)
