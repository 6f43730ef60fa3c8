"""Puts the messages of one stream together: deltas as they come, a completion of each sample at the end.

Must not know: calls, waiting, cancelling.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tokenwire.common.v1 import outcome_pb2
from tokenwire.tokenizer.v1 import tokenizer_pb2 as pb
from tokenwire_client.errors import ErrorCode, IncompleteStream, Internal
from tokenwire_client.tools import Tool, ToolCall, ToolCallDelta
from tokenwire_client.types import Completion, Delta, FinishReason, PositionLogprobs, Sampling, TokenLogprob, Usage

StreamResponse = pb.GenerateResponse | pb.ChatResponse

_REASONS = {
    outcome_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    outcome_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    outcome_pb2.FINISH_REASON_ABORT: FinishReason.ABORT,
    outcome_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}


@dataclass(slots=True)
class _Sample:
    """What has come of one sample."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    prompt_logprobs: list[PositionLogprobs] = field(default_factory=list)
    tool_calls: list[ToolCallDelta] = field(default_factory=list)
    terminal: pb.Completion | None = None

    def add(self, delta: Delta, is_plain: bool) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        if is_plain:
            return
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.tool_calls += delta.tool_calls


class Assembly:
    """State of one stream of `num_samples` samples; of a plain one only text and tokens are read.

    `started` turns true with the first message; `completions`, one of each sample in their order, are set by
    `finish`.
    """

    def __init__(self, num_samples: int = 1, *, is_plain: bool = False) -> None:
        self.started = False
        self.completions: tuple[Completion, ...] = ()
        self._num_samples = num_samples
        self._is_plain = is_plain
        self._samples: dict[int, _Sample] = {}
        self._num_ended = 0

    @property
    def completion(self) -> Completion | None:
        """The first sample's."""
        return self.completions[0] if self.completions else None

    def add(self, response: StreamResponse) -> Delta | None:
        """The news of a message, None when it has none. Raises Internal for a message that may not come."""
        self.started = True
        index = response.index
        sample = self._samples.get(index) or self._new_sample(index)
        if sample.terminal is not None:
            raise Internal(ErrorCode.INTERNAL, "the stream went on after its terminal message")
        if response.HasField("completion"):
            sample.terminal = response.completion
            self._num_ended += 1
        delta = _plain_delta(response, index) if self._is_plain else _delta(response, index)
        if delta is not None:
            sample.add(delta, self._is_plain)
        return delta

    def _new_sample(self, index: int) -> _Sample:
        if index >= self._num_samples:
            raise Internal(ErrorCode.INTERNAL, f"a message of sample {index} came, of {self._num_samples} samples")
        sample = self._samples[index] = _Sample()
        return sample

    def finish(self) -> Completion:
        """At the end of a stream whose status is OK. Raises IncompleteStream without all terminal messages."""
        if self._num_ended < self._num_samples:
            tokens = sum(len(sample.token_ids) for sample in self._samples.values())
            raise IncompleteStream(
                ErrorCode.INCOMPLETE_STREAM,
                f"the stream ended after {tokens} tokens without its terminal message"
                + (f" of {self._num_samples - self._num_ended} samples" if self._num_samples > 1 else ""),
            )
        self.completions = tuple(_completion(index, self._samples[index]) for index in range(self._num_samples))
        return self.completions[0]


def new_assembly(sampling: Sampling, tools: Sequence[Tool] = ()) -> Assembly:
    """For the answer to a request with these settings."""
    is_plain = sampling.logprobs is None and sampling.prompt_logprobs is None and not tools
    return Assembly(max(1, sampling.n or 1), is_plain=is_plain)


def _plain_delta(response: StreamResponse, index: int) -> Delta | None:
    """Reading the empty lists of a message costs more than all the rest, so they are left alone."""
    text, token_ids = response.text, tuple(response.token_ids)
    return Delta(text, token_ids, index) if text or token_ids else None


def _delta(response: StreamResponse, index: int) -> Delta | None:
    logprobs, prompt = _positions(response.logprobs), _positions(response.prompt_logprobs)
    calls = response.tool_calls if isinstance(response, pb.ChatResponse) else ()
    delta = Delta(
        response.text,
        tuple(response.token_ids),
        index,
        logprobs,
        prompt,
        tuple(_tool_call_delta(call) for call in calls),
    )
    return delta if delta.text or delta.token_ids or prompt or delta.tool_calls else None


def _positions(positions: Iterable[pb.TextPositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(
            _logprob(position.token) if position.HasField("token") else None,
            position.rank,
            tuple(_logprob(each) for each in position.top),
        )
        for position in positions
    )


def _logprob(message: pb.TextLogprob) -> TokenLogprob:
    return TokenLogprob(message.token_id, message.token, message.logprob)


def _tool_call_delta(message: pb.ToolCallDelta) -> ToolCallDelta:
    return ToolCallDelta(
        message.index,
        message.id if message.HasField("id") else None,
        message.name if message.HasField("name") else None,
        message.arguments,
    )


def _completion(index: int, sample: _Sample) -> Completion:
    last = sample.terminal
    assert last is not None
    if last.finish_reason not in _REASONS:
        raise Internal(ErrorCode.INTERNAL, f"the terminal message has no known finish reason ({last.finish_reason})")
    return Completion(
        text="".join(sample.texts),
        token_ids=tuple(sample.token_ids),
        finish_reason=_REASONS[last.finish_reason],
        usage=Usage(last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens),
        stop_string=last.stop_string if last.HasField("stop_string") else None,
        stop_token_id=last.stop_token_id if last.HasField("stop_token_id") else None,
        seed=last.seed,
        request_id=last.request_id,
        index=index,
        logprobs=tuple(sample.logprobs),
        prompt_logprobs=tuple(sample.prompt_logprobs),
        tool_calls=_tool_calls(sample.tool_calls),
    )


def _tool_calls(deltas: Iterable[ToolCallDelta]) -> tuple[ToolCall, ...]:
    """The calls of a turn, in their order, their parts put together."""
    parts: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        parts.setdefault(delta.index, []).append(delta)
    return tuple(
        ToolCall(of_call[0].id or "", of_call[0].name or "", "".join(part.arguments for part in of_call))
        for _, of_call in sorted(parts.items())
    )
