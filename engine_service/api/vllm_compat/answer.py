"""One sample of a gateway's request on its way out: deltas while it runs, and one last word with everything.

Must not know: gRPC calls, text, what is running.
"""

import asyncio
from collections.abc import Iterable, Sequence

from smg_grpc_proto import vllm_engine_pb2 as vllm_pb2

from engine_service.api.live_request import Unread
from engine_service.core.outcome import Finish, FinishReason, PositionLogprobs

_REASON = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORT: "abort",
    FinishReason.ERROR: "error",
}


# A few milliseconds' worth: a long prompt has hundreds of thousands of log probabilities.
_POSITIONS_AT_ONCE = 32


class SampleAnswer:
    """Joins the news of a sample. `token_ids` are all tokens so far."""

    def __init__(self, index: int, prompt_ids: Sequence[int]) -> None:
        self._index = index
        self._prompt_ids = prompt_ids
        self._logprobs: list[PositionLogprobs] = []
        self._num_scored = 0
        self._prompt_logprobs = vllm_pb2.InputLogProbs()  # not told yet
        self.token_ids: list[int] = []

    def add(self, unread: Unread) -> None:
        self.token_ids += unread.token_ids
        self._logprobs += unread.logprobs

    async def add_prompt_logprobs(self, entries: Sequence[PositionLogprobs]) -> None:
        """In parts, between which others have their turn."""
        message = self._prompt_logprobs
        for begin in range(0, len(entries), _POSITIONS_AT_ONCE):
            for entry in entries[begin : begin + _POSITIONS_AT_ONCE]:
                message.token_ids.append(self._prompt_ids[self._num_scored])
                value = None if entry.token is None else entry.token[1]
                message.token_logprobs.append(vllm_pb2.InputTokenLogProb(value=value))
                message.top_logprobs.append(_top(entry))
                self._num_scored += 1
            await asyncio.sleep(0)

    def cut(self, length: int) -> None:
        """Takes back what follows the first `length` tokens."""
        del self.token_ids[length:], self._logprobs[length:]

    def chunk(self, start: int) -> vllm_pb2.GenerateResponse:
        """What is new behind the first `start` tokens."""
        chunk = vllm_pb2.GenerateStreamChunk(
            token_ids=self.token_ids[start:],
            prompt_tokens=len(self._prompt_ids),
            completion_tokens=len(self.token_ids) - start,
            index=self._index,
        )
        if self._logprobs:
            chunk.output_logprobs.CopyFrom(_output_logprobs(self._logprobs[start:]))
        if self._prompt_logprobs.token_ids:
            chunk.input_logprobs.CopyFrom(self._prompt_logprobs)
            self._prompt_logprobs = vllm_pb2.InputLogProbs()
        return vllm_pb2.GenerateResponse(chunk=chunk)

    def complete(self, finish: Finish, stop_string: str | None, *, is_stream: bool) -> vllm_pb2.GenerateResponse:
        """The last word. Log probabilities are in it when no chunk has told them."""
        complete = vllm_pb2.GenerateComplete(
            output_ids=self.token_ids,
            finish_reason=_REASON[finish.reason] if stop_string is None else "stop",
            prompt_tokens=finish.prompt_tokens,
            completion_tokens=len(self.token_ids),
            cached_tokens=finish.cached_tokens,
            index=self._index,
        )
        if stop_string is not None:
            complete.matched_stop_str = stop_string
        elif finish.stop_token_id is not None:
            complete.matched_token_id = finish.stop_token_id
        if not is_stream and self._logprobs:
            complete.output_logprobs.CopyFrom(_output_logprobs(self._logprobs))
        if self._prompt_logprobs.token_ids:
            complete.input_logprobs.CopyFrom(self._prompt_logprobs)
        return vllm_pb2.GenerateResponse(complete=complete)


def _output_logprobs(entries: Iterable[PositionLogprobs]) -> vllm_pb2.OutputLogProbs:
    message = vllm_pb2.OutputLogProbs()
    for entry in entries:
        if entry.token is not None:  # always, for a completion
            message.token_ids.append(entry.token[0])
            message.token_logprobs.append(entry.token[1])
        message.top_logprobs.append(_top(entry))
    return message


def _top(entry: PositionLogprobs) -> vllm_pb2.TopLogProbs:
    """The token that is there, then the most likely others: the order this flavour has."""
    there = () if entry.token is None else (entry.token,)
    tokens = [*there, *(token for token in entry.top if not there or token[0] != there[0][0])]
    return vllm_pb2.TopLogProbs(token_ids=[token[0] for token in tokens], values=[token[1] for token in tokens])
